// One pipeline: its current state, its tables, views, runs and errors, its log over time, and details for operators.

import { ChakraUI, React, h, usePolled, useWidth } from "./host.js";
import { Actions } from "./actions.js";
import { Chart } from "./chart.js";
import { ago, bytes, clock, count, decimal, duration, moment, share } from "./format.js";
import { Details, Facts, Loading, Nothing, PageLink, Panel, Problem, ProgressBar, Prose, StateBadge, levelPalette } from "./parts.js";
import { Runs } from "./runs.js";
import { TablePage, useTable } from "./table.js";
import { Tables } from "./tables.js";

const { Badge, Box, Button, Flex, Heading, Link, NativeSelect, SimpleGrid, Table, Text } = ChakraUI;
const { useState } = React;

const SECONDS = 5;
const RANGES = { "20 minutes": 1200, "3 hours": 10800, "24 hours": 86400, "7 days": 604800 };
const FEW = 8;

export function Detail({ name, trail }) {
  const { value: pipeline, error, reload } = usePolled(`cdc/api/pipelines/${encodeURIComponent(name)}`, SECONDS);
  const [ref, width] = useWidth();
  const table = useTable();
  if (!pipeline) return h(Box, null, trail, error ? h(Problem, { error, title: `${name} cannot be shown` }) : h(Loading));
  if (table !== null) return h(TablePage, { alone: trail === null, key: table, name: table, pipeline, reload });
  return h(
    Flex,
    { direction: "column", gap: 4, minWidth: 0, ref },
    h(
      Box,
      null,
      trail,
      h(
        Flex,
        { align: "center", gap: 3, wrap: "wrap" },
        h(Heading, { as: "h1", overflowWrap: "anywhere", size: "xl" }, pipeline.name),
        h(StateBadge, { now: pipeline.now, pipeline }),
        h(Text, { color: "fg.muted", flex: 1, fontSize: "sm", minWidth: "120px" }, pipeline.seen_at == null ? "" : `seen ${ago(pipeline.seen_at, pipeline.now)}`),
        pipeline.may && h(Actions, { pipeline, reload }),
      ),
      h(Origins, { pipeline }),
    ),
    error && h(Problem, { error, status: "warning", title: "The server does not answer; the data shown may be outdated" }),
    h(Troubles, { pipeline }),
    pipeline.state === "new" ? h(NotRun, { pipeline }) : pipeline.state !== "invalid" && pipeline.state !== "unreadable" && h(Body, { pipeline, width }),
  );
}

/** Where the pipeline is described, and where it runs: file, sinks, Dag, and the task and Spark application of its job. */
function Origins({ pipeline: { name, file, sinks, may, jobs } }) {
  const job = jobs?.find(({ state }) => state === "alive");
  const parts = [
    h(Text, { as: "span", key: "file" }, file),
    sinks && h(Text, { as: "span", key: "sinks" }, sinks.map(({ type, mode }) => `${type} (${mode})`).join(", ")),
    may?.run && h(PageLink, { key: "dag", to: `/dags/${may.run.dag_id}` }, `Dag ${may.run.dag_id}`),
    job?.task && h(PageLink, { key: "run", to: `/dags/${job.task.dag_id}/runs/${encodeURIComponent(job.task.run_id)}` }, "Dag run"),
    job?.task && h(PageLink, { key: "task", to: taskPath(job.task) }, "Task log"),
    job?.submission && h(SparkLink, { job, key: "spark", name }),
  ].filter(Boolean);
  return h(Flex, { color: "fg.muted", columnGap: 3, fontSize: "xs", mt: 1, overflowWrap: "anywhere", wrap: "wrap" }, parts);
}

const taskPath = ({ dag_id, run_id, task_id, map_index }) =>
  `/dags/${dag_id}/runs/${encodeURIComponent(run_id)}/tasks/${encodeURIComponent(task_id)}${map_index < 0 ? "" : `/mapped/${map_index}`}`;

const SparkLink = ({ name, job }) =>
  h(
    Link,
    { color: "fg.info", href: new URL(`cdc/api/pipelines/${encodeURIComponent(name)}/spark/${job.submission}`, document.baseURI).href, rel: "noreferrer", target: "_blank" },
    job.state === "alive" ? "Spark UI" : "Spark history",
  );

function Troubles({ pipeline: { error, restart, waiting, slot, now } }) {
  const next = restart && `attempt ${restart.attempt} of ${restart.of} begins in ${duration(Math.max(0, restart.next_attempt_at - now))}`;
  return h(
    React.Fragment,
    null,
    error && h(Problem, { error, note: next, status: restart ? "warning" : "error" }),
    waiting && h(Problem, { error: { message: waiting }, status: "warning", title: "Waiting" }),
    slot?.error && h(Problem, { error: slot.error, status: "warning", title: "The slot could not be read from the source" }),
  );
}

const NotRun = ({ pipeline: { file, may } }) =>
  h(
    Nothing,
    { title: "Nothing has run yet" },
    may.run && h(Prose, { text: `Trigger the Dag \`${may.run.dag_id}\`${may.run.shared ? ` with the parameter \`pipeline\` set to \`${file}\`` : ""}.` }),
    h(Prose, { text: `From a command line: \`airflow-cdc run --pipeline ${file}\`.` }),
    h(Text, { mt: 2 }, "Progress, lag and the slot's log appear here as soon as the first job reports."),
  );

function Body({ pipeline, width }) {
  const wide = width >= 900;
  return h(
    React.Fragment,
    null,
    h(Facts, { facts: factsOf(pipeline) }),
    pipeline.snapshot && h(Snapshot, { snapshot: pipeline.snapshot }),
    h(Tables, { narrow: width < 760, now: pipeline.now, tables: pipeline.tables }),
    pipeline.views.length > 0 && h(Views, { views: pipeline.views }),
    h(SimpleGrid, { alignItems: "start", columns: wide ? 2 : 1, gap: 4 }, h(Runs, { pipeline }), h(Errors, { errors: pipeline.errors, now: pipeline.now })),
    pipeline.slot && h(SourceLog, { pipeline }),
    h(Panel, { title: "Jobs" }, h(Jobs, { name: pipeline.name, jobs: pipeline.jobs, now: pipeline.now }), h(Details, { title: "Batches, positions and processes" }, h(Batches, { batches: pipeline.batches }), h(Processes, { jobs: pipeline.jobs }))),
  );
}

function factsOf({ lag_bytes, lag_messages, lag_seconds, has_slot, rows_per_second, slot, snapshot, tables, batches, now }) {
  const sum = tables.reduce((all, { per_minute: minute }) => all + (minute ? minute[0] + minute[1] + minute[2] : 0), 0);
  const counted = tables.some(({ per_minute: minute }) => minute);
  const [batch] = batches;
  return [
    has_slot
      ? ["Lag", lag_seconds == null ? bytes(lag_bytes) : duration(lag_seconds), lag_seconds == null ? "of log not applied" : `${bytes(lag_bytes)} of log not applied`]
      : ["Lag", count(lag_messages), "messages not read"],
    ["Tables", count(tables.length), `${count(tables.filter(({ finished, chunks }) => finished === chunks).length)} copied`],
    snapshot
      ? ["Copied", `${count(snapshot.rows_per_second)}/s`, "rows per second"]
      : counted
        ? ["Changes", `${count(sum)}/min`, `${count(rows_per_second)} per second now`]
        : ["Last changes", count(batch?.changes), batch ? ago(batch.at, now) : "none yet"],
    has_slot && ["Retained log", bytes(slot?.retained_bytes), budgetText(slot)],
  ].filter(Boolean);
}

const budgetText = (slot) => (slot?.budget_bytes ? `${Math.round(share(slot.retained_bytes, slot.budget_bytes))} % of ${bytes(slot.budget_bytes)}, then ${slot.budget_action}` : "on the source");

const Snapshot = ({ snapshot: { chunks, finished, eta, rows } }) =>
  h(
    Panel,
    { aside: h(Text, { color: "fg.muted", fontSize: "xs" }, `${count(finished)} of ${count(chunks)} chunks, ${count(rows)} rows${eta == null ? "" : `, ${duration(eta)} left`}`), title: "Copy" },
    h(ProgressBar, { done: finished, label: "Chunks copied", whole: chunks }),
  );

function SourceLog({ pipeline: { slot, series, now } }) {
  const [range, setRange] = useState("3 hours");
  const first = series.at.findIndex((at) => at >= (series.at.at(-1) ?? 0) - RANGES[range]);
  const from = (name) => series[name].slice(Math.max(0, first));
  const at = from("at");
  return h(
    Panel,
    {
      title: "Log of the source",
      aside: h(
        Flex,
        { align: "center", gap: 3, wrap: "wrap" },
        h(Text, { color: "fg.muted", fontSize: "xs" }, [slot.active == null ? null : slot.active ? "being read" : "not read", `seen ${ago(slot.at, now)}`].filter(Boolean).join(" · ")),
        h(
          NativeSelect.Root,
          { size: "xs", width: "110px" },
          h(NativeSelect.Field, { "aria-label": "Time range", onChange: (event) => setRange(event.target.value), value: range }, Object.keys(RANGES).map((key) => h("option", { key, value: key }, key))),
          h(NativeSelect.Indicator),
        ),
      ),
    },
    h(Title, null, `Retained log${slot.budget_bytes ? `, ${budgetText(slot)}` : ""}`),
    h(Chart, {
      at,
      binary: true,
      format: bytes,
      height: 170,
      limit: slot.budget_bytes && { text: `budget ${bytes(slot.budget_bytes)}`, value: slot.budget_bytes },
      palette: levelPalette(slot),
      title: "Retained log",
      values: from("retained_bytes"),
    }),
    h(
      SimpleGrid,
      { columnGap: 6, minChildWidth: "min(260px, 100%)", rowGap: 2 },
      h(Box, { minWidth: 0 }, h(Title, null, "Lag"), h(Chart, { at, binary: true, format: bytes, height: 120, palette: "purple", title: "Lag", values: from("lag_bytes") })),
      h(Box, { minWidth: 0 }, h(Title, null, "Rows/s"), h(Chart, { at, format: count, height: 120, palette: "green", title: "Rows per second", values: from("rows_per_second") })),
    ),
    slot.restart_lsn && h(Details, { title: `Positions of slot ${slot.name}${slot.wal_status ? `, ${slot.wal_status}` : ""}` }, h(Ruler, { slot })),
  );
}

const Title = ({ children }) => h(Text, { as: "h3", color: "fg.muted", fontSize: "xs", mb: 1, mt: 4 }, children);

/** The log from the position where the server must keep it to its end, and the positions between. */
function Ruler({ slot }) {
  const marks = [
    ["restart_lsn", slot.restart_lsn, null, "The source keeps its log from here"],
    ["confirmed_flush_lsn", slot.confirmed_flush_lsn, slot.acknowledged_bytes, "Acknowledged to the source"],
    ["applied LSN", slot.applied_lsn ?? "–", slot.applied_bytes, "Durable in the sink"],
    ["end of log", "", slot.lag_bytes, "Written but not applied yet"],
  ];
  const colors = ["bg.emphasized", "green.solid", "purple.solid"];
  const parts = [slot.acknowledged_bytes, slot.applied_bytes, slot.lag_bytes];
  const whole = parts.reduce((sum, part) => sum + part, 0) || 1;
  return h(
    Box,
    null,
    h(
      Flex,
      { "aria-hidden": true, borderRadius: "sm", gap: "2px", height: "10px", mb: 2, overflow: "hidden" },
      parts.map((part, i) => part > 0 && h(Box, { bg: colors[i], flexBasis: 0, flexGrow: part / whole, key: i, minWidth: "3px" })),
    ),
    h(
      SimpleGrid,
      { gap: 2, minChildWidth: "115px" },
      marks.map(([title, lsn, size, help], i) =>
        h(
          Box,
          { key: title, minWidth: 0, title: help },
          h(Flex, { align: "center", gap: 1.5 }, i > 0 && h(Box, { bg: colors[i - 1], borderRadius: "xs", boxSize: "8px", flexShrink: 0 }), h(Text, { color: "fg.muted", fontSize: "xs", minWidth: 0, overflowWrap: "anywhere" }, title)),
          h(Text, { fontFamily: "mono", fontSize: "sm" }, lsn || bytes(slot.retained_bytes)),
          h(Text, { color: "fg.muted", fontSize: "xs" }, size == null ? help : i === 3 && !lsn ? `retained, ${bytes(size)} not applied` : `+ ${bytes(size)}`),
        ),
      ),
    ),
  );
}

const VIEW_STATES = {
  waiting: { palette: "scheduled", text: "It is built once the tables are consistent" },
  building: { palette: "running", text: "Its rows are being computed for the first time" },
  "up-to-date": { palette: "success", text: "It equals its SELECT over the tables" },
  queued: { palette: "queued", text: "Some affected rows wait to be computed again" },
  rebuilding: { palette: "running", text: "A new version is being built; readers see the former one" },
  removed: { palette: "none", text: "It is no longer in the pipeline file and does not move" },
};

function Views({ views }) {
  const [all, setAll] = useState(false);
  return h(
    Panel,
    { title: "Views" },
    views.slice(0, all ? undefined : FEW).map((view) =>
      h(
        Box,
        { key: `${view.sink ?? ""} ${view.view}`, py: 1 },
        h(
          Flex,
          { align: "center", columnGap: 3, fontSize: "sm", wrap: "wrap" },
          h(Text, { fontWeight: "medium", overflowWrap: "anywhere", title: view.as_of && `as of ${view.as_of}` }, view.view),
          h(Badge, { colorPalette: VIEW_STATES[view.state]?.palette, size: "xs", title: VIEW_STATES[view.state]?.text, variant: "solid" }, view.state),
          h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, describeView(view)),
        ),
        view.built_percent < 100 && h(ProgressBar, { done: view.built_percent, label: `${view.view} built`, mt: 1, whole: 100 }),
      ),
    ),
    h(More, { all, number: views.length, setAll, what: "views" }),
  );
}

const describeView = ({ anchors_per_unit, built_percent, milliseconds_per_unit, queued, refresh, sink, units }) =>
  [
    sink,
    built_percent < 100 && `${decimal(built_percent)} % built`,
    queued > 0 && `${count(queued)} queued`,
    units > 0 && `${count(units)} units, ${decimal(anchors_per_unit)} ${anchors_per_unit === 1 ? "anchor" : "anchors"} and ${decimal(milliseconds_per_unit)} ms each`,
    refresh && `refreshed every ${duration(refresh)}`,
  ]
    .filter(Boolean)
    .join(" · ");

const More = ({ all, setAll, number, what }) =>
  number > FEW && h(Button, { onClick: () => setAll(!all), size: "xs", variant: "ghost" }, all ? "Show fewer" : `Show all ${count(number)} ${what}`);

function Batches({ batches }) {
  const [all, setAll] = useState(false);
  if (batches.length === 0) return h(Text, { color: "fg.muted", fontSize: "sm" }, "No batch has been applied yet.");
  return h(
    Box,
    null,
    h(
      Table.ScrollArea,
      null,
      h(
        Table.Root,
        { "aria-label": "Recent batches", css: { "& th, & td": { fontSize: "xs", px: 0.5, py: 1.5 } }, size: "sm" },
        h(Table.Header, null, h(Table.Row, { bg: "transparent" }, ["Time", "Changes", "Duration", "End LSN"].map((title, i) => h(Table.ColumnHeader, { key: title, textAlign: i ? "end" : "start" }, title)))),
        h(
          Table.Body,
          null,
          batches.slice(0, all ? undefined : FEW).map((batch, i) =>
            h(
              Table.Row,
              { bg: "transparent", key: `${batch.at} ${i}` },
              h(Table.Cell, { title: moment(batch.at) }, clock(batch.at)),
              h(Table.Cell, { textAlign: "end" }, count(batch.changes)),
              h(Table.Cell, { textAlign: "end", whiteSpace: "nowrap" }, duration(batch.seconds)),
              h(Table.Cell, { fontFamily: "mono", fontSize: "xs", textAlign: "end" }, batch.end_lsn),
            ),
          ),
        ),
      ),
    ),
    h(More, { all, number: batches.length, setAll, what: "batches" }),
  );
}

function Errors({ errors, now }) {
  const [all, setAll] = useState(false);
  return h(
    Panel,
    { title: "Recent errors" },
    errors.length === 0
      ? h(Text, { color: "fg.muted", fontSize: "sm" }, "None.")
      : errors.slice(0, all ? undefined : FEW).map((error, i) =>
          h(
            Box,
            { borderTopWidth: i ? 1 : 0, fontSize: "sm", key: `${error.at} ${i}`, py: 2 },
            h(
              Flex,
              { align: "baseline", gap: 2, wrap: "wrap" },
              h(Text, { color: "red.fg", fontWeight: "semibold" }, error.kind),
              error.count > 1 && h(Badge, { size: "xs" }, `× ${error.count}`),
              h(Text, { color: "fg.muted", fontSize: "xs", title: moment(error.at) }, `${error.part}, ${ago(error.at, now)}`),
            ),
            h(Prose, { text: error.message }),
            h(Prose, { color: "fg.muted", text: error.solution }),
          ),
        ),
    h(More, { all, number: errors.length, setAll, what: "errors" }),
  );
}

const JOB_PALETTES = { alive: "success", ended: "queued", lost: "failed" };

const Jobs = ({ jobs, name, now }) =>
  jobs.map((job) =>
    h(
      Flex,
      { align: "center", columnGap: 3, fontSize: "sm", key: job.part, py: 1, wrap: "wrap" },
      h(Text, { fontWeight: "medium", minWidth: "90px" }, job.part),
      h(Badge, { colorPalette: JOB_PALETTES[job.state], size: "xs", variant: "solid" }, job.state),
      h(Text, { color: "fg.muted", fontSize: "xs" }, `heard ${ago(job.at, now)}`),
      job.task && h(Text, { fontSize: "xs" }, h(PageLink, { to: taskPath(job.task) }, `Log of task ${job.task.task_id}`)),
      job.submission && h(Text, { fontSize: "xs" }, h(SparkLink, { job, name })),
    ),
  );

const Processes = ({ jobs }) =>
  jobs.map((job) =>
    h(Text, { color: "fg.muted", fontSize: "xs", key: job.part, mt: 1, overflowWrap: "anywhere" }, [`${job.part}: ${job.owner}`, `epoch ${job.epoch}`, job.log && `log ${job.log}`].filter(Boolean).join(" · ")),
  );
