// Buttons for the actions that the user may take on a pipeline. Airflow's REST API does them, and checks permissions.

import { ChakraUI, React, ReactRouterDOM, h, send } from "./host.js";
import { count } from "./format.js";
import { AT_WORK } from "./parts.js";

const { Alert, Box, Button, CloseButton, Dialog, Flex, Link, Portal } = ChakraUI;
const { useState } = React;

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

const UNTIL = {
  caught_up: "Until it has caught up: everything committed before it begins is applied",
  forever: "Until a user stops it",
};

// How long the stream may run, if the Dag has the field of `cdc_dag()`.
async function startChoices(dag, pipeline) {
  const [{ params }, conf] = await Promise.all([send("GET", `${dagPath(dag.dag_id)}/details`), lastConf(dag, pipeline)]);
  if (!params?.until) return { conf };
  const chosen = conf.until ?? params.until.value;
  return { conf, choices: UNTIL, chosen: chosen in UNTIL ? chosen : "forever" };
}

const startAction = (dag, pipeline) => ({
  title: pipeline.state === "new" ? "Start" : "Resume",
  solid: true,
  question: `${pipeline.state === "new" ? "Start" : "Resume"} ${pipeline.name}?`,
  text: `Dag ${dag.dag_id} is ${dag.is_paused ? "unpaused and " : ""}triggered. ${pipeline.state === "new" ? "It checks everything, copies the tables, and then applies the changes." : "It continues where the last run ended; nothing is copied twice."}`,
  prepare: () => startChoices(dag, pipeline),
  act: async ({ conf, choices, chosen }) => {
    if (dag.is_paused) await setPaused(dag.dag_id, false);
    // The end of the last run's stream may have been an LSN, which is a choice, too.
    return trigger(dag, pipeline, choices ? { ...conf, until: chosen, ...(conf.until_lsn && { until_lsn: null }) } : conf);
  },
});

// The Dag is not unpaused automatically, because that would also start its schedule.
const verifyAction = (verify, pipeline) => ({
  title: "Verify",
  question: `Verify ${pipeline.name}?`,
  text: "All tables of the pipeline are compared row by row, also while the stream runs. Both servers read all of them once.",
  hindrance: verify.is_paused ? `Dag ${verify.dag_id} is paused.` : undefined,
  act: () => trigger(verify, pipeline),
});

/** @param {() => void} reload called after an action. */
export function Actions({ pipeline, reload }) {
  const { stop: mayStop, run: dag, verify } = pipeline.may;
  const atWork = AT_WORK.includes(pipeline.state);
  if (["invalid", "unreadable"].includes(pipeline.state)) return null;
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
    !atWork && dag?.may_trigger && (dag.may_pause || !dag.is_paused) && startAction(dag, pipeline),
    pipeline.state !== "new" && verify?.may_trigger && verifyAction(verify, pipeline),
  ];
  return h(Buttons, { actions: actions.filter(Boolean), reload });
}

/** Buttons of a table's page. */
export function TableActions({ pipeline, table, reload }) {
  const { reread, verify } = pipeline.may;
  const streams = ["live", "catching up"].includes(pipeline.state);
  const actions = [
    reread?.may_trigger && {
      title: "Read again",
      question: `Read ${table.table} again?`,
      text: [
        `About ${count(table.rows)} rows are read from the source and replace those in the sink.`,
        streams ? "The stream does it between two units, and changes of all tables wait meanwhile." : "No stream is running, so the task reads them itself.",
        "Readers never see an older version of a row, and rows that the source does not have are deleted.",
        reread.is_paused ? `Dag ${reread.dag_id} is unpaused for this.` : "",
      ].join(" "),
      hindrance: reread.is_paused && !reread.may_pause ? `Dag ${reread.dag_id} is paused.` : undefined,
      act: async () => {
        if (reread.is_paused) await setPaused(reread.dag_id, false);
        return trigger(reread, pipeline, { tables: [table.table] });
      },
    },
    verify?.may_trigger && verifyAction(verify, pipeline),
  ];
  return h(Buttons, { actions: actions.filter(Boolean), reload });
}

function Buttons({ actions, reload }) {
  const [asked, setAsked] = useState(null);
  const [busy, setBusy] = useState(false);
  const [outcome, setOutcome] = useState(null);
  const attempt = async (title, act) => {
    setBusy(true);
    try {
      await act();
    } catch (error) {
      setOutcome({ status: "error", text: `${title} failed: ${error.message}` });
    }
    setBusy(false);
  };
  const ask = (action) => attempt(action.title, async () => setAsked({ ...action, ...(await action.prepare?.()) }));
  const perform = (action) =>
    attempt(action.title, async () => {
      setAsked(null);
      setOutcome({ status: "success", ...(await action.act(action)) });
      reload();
    });
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
            onClick: () => ask(action),
            size: "sm",
            title: action.hindrance,
            variant: action.solid ? "solid" : "outline",
          },
          action.title,
        ),
      ),
    ),
    outcome && h(Outcome, { close: () => setOutcome(null), outcome }),
    h(Question, { action: asked, choose: (chosen) => setAsked({ ...asked, chosen }), close: () => setAsked(null), perform }),
  );
}

const Outcome = ({ outcome, close }) =>
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
    h(CloseButton, { "aria-label": "Dismiss", onClick: close, size: "xs" }),
  );

const Question = ({ action, choose, close, perform }) =>
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
          h(
            Dialog.Body,
            null,
            action?.text,
            action?.choices &&
              h(
                Box,
                { as: "fieldset", mt: 3 },
                h(Box, { as: "legend", fontWeight: "medium", mb: 1 }, "How long does the stream run?"),
                Object.entries(action.choices).map(([value, text]) =>
                  h(
                    Flex,
                    { align: "baseline", as: "label", gap: 2, key: value, py: 0.5 },
                    h("input", { checked: action.chosen === value, name: "until", onChange: () => choose(value), type: "radio", value }),
                    text,
                  ),
                ),
              ),
          ),
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
