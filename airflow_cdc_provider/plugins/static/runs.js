// Who did what when: the runs of the Dags that work on a pipeline, and requests to stop it.

import { ChakraUI, React, h, send } from "./host.js";
import { ago, duration, moment } from "./format.js";
import { PageLink, Panel } from "./parts.js";

const { Badge, Flex, Text } = ChakraUI;
const { useEffect, useState } = React;

const SECONDS = 15;
const MOST = 10;
const WHATS = { run: "ran it", verify: "verified it", reread: "read tables again" };
const PALETTES = { success: "success", failed: "failed", running: "running", queued: "queued" };

/** The latest runs of the Dags, newest first; empty for users who may not see them. */
function useRuns(pipeline) {
  const [found, setFound] = useState([]);
  const dags = JSON.stringify(Object.keys(WHATS).map((what) => [what, pipeline.may?.[what]?.dag_id, pipeline.may?.[what]?.shared]));
  useEffect(() => {
    const controller = new AbortController();
    const ask = async () => {
      if (document.visibilityState !== "visible") return;
      const lists = await Promise.all(
        JSON.parse(dags).map(async ([what, dag, shared]) => {
          if (!dag) return [];
          try {
            const mine = shared ? `&conf_contains=${encodeURIComponent(pipeline.file)}` : "";
            const { dag_runs: runs } = await send("GET", `api/v2/dags/${encodeURIComponent(dag)}/dagRuns?order_by=-run_after&limit=25${mine}`, undefined, controller.signal);
            return runs.filter(({ conf }) => !shared || conf?.pipeline === pipeline.file).map((run) => ({ what, run }));
          } catch {
            return [];
          }
        }),
      );
      if (!controller.signal.aborted) setFound(lists.flat());
    };
    ask();
    const timer = setInterval(ask, SECONDS * 1000);
    return () => {
      controller.abort();
      clearInterval(timer);
    };
  }, [dags, pipeline.file]);
  return found;
}

const seconds = (text) => (text ? Date.parse(text) / 1000 : null);

const asEvent = ({ what, run }) => {
  const [begun, ended] = [seconds(run.start_date ?? run.run_after), seconds(run.end_date)];
  return {
    at: begun,
    who: run.triggering_user_name ?? (run.run_type === "scheduled" ? "the schedule" : run.run_type),
    text: what === "reread" && run.conf?.tables?.length ? `read ${run.conf.tables.join(", ")} again` : WHATS[what],
    run,
    took: begun && ended ? duration(ended - begun) : "",
  };
};

export function Runs({ pipeline }) {
  const events = [
    ...useRuns(pipeline).map(asEvent),
    ...pipeline.stops.map(({ at, by, parts }) => ({ at, who: by, text: `asked to stop: ${parts.join(", ")}`, took: "" })),
  ]
    .sort((a, b) => b.at - a.at)
    .slice(0, MOST);
  return h(
    Panel,
    { aside: pipeline.may?.run && h(Text, { fontSize: "xs" }, h(PageLink, { to: `/dags/${pipeline.may.run.dag_id}/events` }, "Audit log of Airflow")), title: "Who did what" },
    events.length === 0
      ? h(Text, { color: "fg.muted", fontSize: "sm" }, "Nothing yet.")
      : events.map(({ at, who, text, run, took }) =>
          h(
            Flex,
            { align: "center", columnGap: 3, fontSize: "sm", key: `${at} ${text}`, py: 1, wrap: "wrap" },
            h(Text, { color: "fg.muted", fontSize: "xs", minWidth: "90px", title: moment(at) }, ago(at, pipeline.now)),
            h(Text, { overflowWrap: "anywhere" }, h(Text, { as: "span", fontWeight: "medium" }, who), ` ${text}`),
            run && h(Badge, { colorPalette: PALETTES[run.state], size: "xs", variant: "solid" }, run.state),
            run && h(Text, { color: "fg.muted", fontSize: "xs" }, took),
            run && h(Text, { fontSize: "xs" }, h(PageLink, { to: `/dags/${run.dag_id}/runs/${encodeURIComponent(run.dag_run_id)}` }, `Run of ${run.dag_id}`)),
          ),
        ),
  );
}
