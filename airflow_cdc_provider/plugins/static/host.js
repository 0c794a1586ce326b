// The libraries that Airflow's page shares with plugins, and the requests of this plugin to the server.

const { React, ChakraUI, ReactRouterDOM } = globalThis;

export { React, ChakraUI, ReactRouterDOM };
export const h = React.createElement;
const { useEffect, useState } = React;

// The base element has the address that Airflow is served from.
const address = (path) => new URL(path, document.baseURI);

/** An error response of the server. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends a request as the user of the page; returns the object in the response. */
export async function send(method, path, body, signal) {
  const answer = await fetch(address(path), {
    method,
    signal,
    credentials: "same-origin",
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    // Some proxies answer with their own page.
  }
  if (!answer.ok) {
    const detail = value?.detail;
    throw new Refused(answer.status, typeof detail === "string" ? detail : detail?.reason ?? answer.statusText);
  }
  return value;
}

/**
 * The response to a GET, requested again every few seconds while the page is visible.
 *
 * @returns {{value, error, reload}} the latest response is kept while later requests fail.
 */
export function usePolled(path, seconds) {
  const [found, setFound] = useState({});
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return undefined;
    const controller = new AbortController();
    let timer;
    const ask = async () => {
      clearTimeout(timer);
      if (document.visibilityState === "visible") {
        try {
          const value = await send("GET", path, undefined, controller.signal);
          setFound({ path, value });
        } catch (error) {
          if (controller.signal.aborted) return;
          setFound((before) => ({ path, value: before.path === path ? before.value : undefined, error }));
        }
      }
      if (!controller.signal.aborted) timer = setTimeout(ask, seconds * 1000);
    };
    ask();
    document.addEventListener("visibilitychange", ask);
    return () => {
      controller.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", ask);
    };
  }, [path, seconds, turn]);
  const current = found.path === path ? found : {};
  return { ...current, reload: () => setTurn((before) => before + 1) };
}

/** A ref, and the width in pixels of the element that has it; 0 until it is known. */
export function useWidth() {
  const [element, setElement] = useState(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (element === null) return undefined;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element);
    return () => observer.disconnect();
  }, [element]);
  return [setElement, width];
}
