// Buttons for the actions that the user may take on a pipeline. Airflow's REST API does them, and checks permissions.

import { ChakraUI, React, ReactRouterDOM, h, send } from "./host.js";

const { Alert, Button, CloseButton, Dialog, Flex, Link, Portal } = ChakraUI;
const { useState } = React;

const AT_WORK = ["starting", "streaming", "snapshotting", "restarting"];
const dagPath = (id) => `api/v2/dags/${encodeURIComponent(id)}`;

const setPaused = (id, paused) => send("PATCH", `${dagPath(id)}?update_mask=is_paused`, { is_paused: paused });

// The configuration of the pipeline's last run, such as a stream that runs until it is stopped.
async function lastConf({ dag_id, shared }, pipeline) {
  const { dag_runs: runs } = await send("GET", `${dagPath(dag_id)}/dagRuns?order_by=-run_after&limit=100`);
  return runs.find(({ conf }) => !shared || conf?.pipeline === pipeline.file)?.conf ?? {};
}

async function trigger({ dag_id, shared }, pipeline, before = {}) {
  const conf = shared ? { ...before, pipeline: pipeline.file } : before;
  const run = await send("POST", `${dagPath(dag_id)}/dagRuns`, { conf, logical_date: null });
  return { text: `Dag ${dag_id} has been triggered.`, run };
}

const stop = async (pipeline) => {
  const { asked } = await send("POST", `cdc/api/pipelines/${encodeURIComponent(pipeline.name)}/stop`);
  return { text: asked.length ? `Asked to stop: ${asked.join(", ")}.` : "No job was running." };
};

/** @param {() => void} reload called after an action. */
export function Actions({ pipeline, reload }) {
  const [asked, setAsked] = useState(null);
  const [busy, setBusy] = useState(false);
  const [outcome, setOutcome] = useState(null);
  const { stop: mayStop, run: dag, verify } = pipeline.may;
  const atWork = AT_WORK.includes(pipeline.state);
  const actions = [
    atWork &&
      mayStop && {
        title: "Stop",
        question: `Stop ${pipeline.name}?`,
        text: "Its job ends after the current unit; no data is lost. The next run continues from there.",
        act: () => stop(pipeline),
      },
    atWork &&
      mayStop &&
      dag?.may_pause &&
      !dag.is_paused && {
        title: "Pause",
        question: `Pause ${pipeline.name}?`,
        text: `Its job ends after the current unit, and Dag ${dag.dag_id} is paused${dag.shared ? ", for all pipelines that it runs" : ""}, so that no new run starts. Meanwhile the source retains its log.`,
        act: async () => {
          await setPaused(dag.dag_id, true);
          return { text: `${(await stop(pipeline)).text} Dag ${dag.dag_id} is paused.` };
        },
      },
    !atWork &&
      dag?.may_trigger &&
      (dag.may_pause || !dag.is_paused) && {
        title: pipeline.state === "new" ? "Start" : "Resume",
        solid: true,
        act: async () => {
          if (dag.is_paused) await setPaused(dag.dag_id, false);
          return trigger(dag, pipeline, await lastConf(dag, pipeline));
        },
      },
    // The Dag is not unpaused automatically, because that would also start its schedule.
    pipeline.state !== "new" &&
      verify?.may_trigger && {
        title: "Verify",
        hindrance: verify.is_paused ? `Dag ${verify.dag_id} is paused.` : undefined,
        act: () => trigger(verify, pipeline),
      },
  ].filter(Boolean);
  const perform = async (action) => {
    setAsked(null);
    setBusy(true);
    try {
      setOutcome({ status: "success", ...(await action.act()) });
    } catch (error) {
      setOutcome({ status: "error", text: `${action.title} failed: ${error.message}` });
    }
    setBusy(false);
    reload();
  };
  return h(
    React.Fragment,
    null,
    h(
      Flex,
      { gap: 2, wrap: "wrap" },
      actions.map((action) =>
        h(
          Button,
          {
            colorPalette: "brand",
            disabled: busy || Boolean(action.hindrance),
            key: action.title,
            onClick: () => (action.question ? setAsked(action) : perform(action)),
            size: "sm",
            title: action.hindrance,
            variant: action.solid ? "solid" : "outline",
          },
          action.title,
        ),
      ),
    ),
    outcome &&
      h(
        Alert.Root,
        { flexBasis: "100%", size: "sm", status: outcome.status },
        h(Alert.Indicator),
        h(
          Alert.Content,
          null,
          h(
            Alert.Title,
            null,
            `${outcome.text} `,
            outcome.run &&
              h(
                Link,
                { asChild: true, textDecoration: "underline" },
                h(ReactRouterDOM.Link, { to: `/dags/${outcome.run.dag_id}/runs/${encodeURIComponent(outcome.run.dag_run_id)}` }, "See the run"),
              ),
          ),
        ),
        h(CloseButton, { "aria-label": "Dismiss", onClick: () => setOutcome(null), size: "xs" }),
      ),
    h(Question, { action: asked, close: () => setAsked(null), perform }),
  );
}

const Question = ({ action, close, perform }) =>
  h(
    Dialog.Root,
    { onOpenChange: ({ open }) => open || close(), open: action !== null, role: "alertdialog", size: "sm" },
    h(
      Portal,
      null,
      h(Dialog.Backdrop),
      h(
        Dialog.Positioner,
        null,
        h(
          Dialog.Content,
          null,
          h(Dialog.Header, null, h(Dialog.Title, null, action?.question)),
          h(Dialog.Body, null, action?.text),
          h(
            Dialog.Footer,
            null,
            h(Button, { onClick: close, size: "sm", variant: "outline" }, "Cancel"),
            h(Button, { colorPalette: "brand", onClick: () => perform(action), size: "sm" }, action?.title),
          ),
        ),
      ),
    ),
  );
