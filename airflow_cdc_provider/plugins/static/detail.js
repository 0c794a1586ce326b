// One pipeline: its current state, its slot over time, chunks, batches and errors.

import { ChakraUI, React, h, usePolled, useWidth } from "./host.js";
import { Actions } from "./actions.js";
import { Chart } from "./chart.js";
import { ago, bytes, clock, count, decimal, duration, moment } from "./format.js";
import { BudgetBar, Nothing, Panel, Problem, ProgressBar, Prose, StateBadge, levelPalette } from "./parts.js";

const { Badge, Box, Button, Flex, Heading, NativeSelect, SimpleGrid, Spinner, Table, Text } = ChakraUI;
const { useState } = React;

const SECONDS = 5;
const RANGES = { "20 minutes": 1200, "3 hours": 10800, "24 hours": 86400, "7 days": 604800 };
const FEW = 8;

export function Detail({ name, trail }) {
  const { value: pipeline, error, reload } = usePolled(`cdc/api/pipelines/${encodeURIComponent(name)}`, SECONDS);
  const [ref, width] = useWidth();
  if (!pipeline) {
    return h(Box, null, trail, error ? h(Problem, { error, title: `${name} cannot be shown` }) : h(Flex, { justify: "center", p: 10 }, h(Spinner, { "aria-label": "Loading" })));
  }
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
        h(StateBadge, { state: pipeline.state }),
        h(Text, { color: "fg.muted", flex: 1, fontSize: "sm", minWidth: "120px" }, pipeline.seen_at == null ? "" : `seen ${ago(pipeline.seen_at, pipeline.now)}`),
        pipeline.may && h(Actions, { pipeline, reload }),
      ),
      h(Text, { color: "fg.muted", fontSize: "xs", mt: 1, overflowWrap: "anywhere" }, describeFile(pipeline)),
    ),
    error && h(Problem, { error, status: "warning", title: "The server does not answer; the data shown may be outdated" }),
    h(Troubles, { pipeline }),
    pipeline.state === "new" ? h(NotRun, { pipeline }) : pipeline.state !== "invalid" && pipeline.state !== "unreadable" && h(Body, { pipeline, width }),
  );
}

const describeFile = ({ file, captured, sinks }) => `${file}${captured ? ` · ${captured.join(", ")} · ${sinks.join(", ")}` : ""}`;

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
  const copied = pipeline.tables.every((table) => table.finished === table.chunks);
  return h(
    React.Fragment,
    null,
    h(Facts, { pipeline }),
    pipeline.slot && h(Slot, { pipeline }),
    !copied && h(Snapshot, { pipeline }),
    pipeline.views.length > 0 && h(Views, { views: pipeline.views }),
    h(SimpleGrid, { alignItems: "start", columns: wide ? 2 : 1, gap: 4 }, h(Errors, { errors: pipeline.errors, now: pipeline.now }), h(Batches, { batches: pipeline.batches })),
    copied && pipeline.tables.length > 0 && h(Snapshot, { pipeline }),
    h(Jobs, { jobs: pipeline.jobs, now: pipeline.now }),
  );
}

function Facts({ pipeline: { lag_bytes, lag_messages, lag_seconds, has_slot, rows_per_second, slot, snapshot, batches, now } }) {
  const [batch] = batches;
  const facts = [
    has_slot ? ["Lag", bytes(lag_bytes), lag_seconds == null ? "of log not applied" : `${duration(lag_seconds)} behind`] : ["Lag", count(lag_messages), "messages not read"],
    ["Rows/s", count(rows_per_second ?? snapshot?.rows_per_second), snapshot ? "copied" : "applied"],
    has_slot && ["Retained WAL", bytes(slot?.retained_bytes), slot?.budget_bytes ? `budget ${bytes(slot.budget_bytes)}, then ${slot.budget_action}` : "on the source"],
    snapshot
      ? ["Snapshot", `${snapshot.finished} of ${snapshot.chunks}`, snapshot.eta == null ? "chunks" : `chunks, ${duration(snapshot.eta)} left`]
      : ["Last batch", count(batch?.changes), batch ? `changes in ${duration(batch.seconds)}, ${ago(batch.at, now)}` : "none yet"],
  ].filter(Boolean);
  return h(
    SimpleGrid,
    { gap: 3, minChildWidth: "125px" },
    facts.map(([title, value, help]) =>
      h(
        Box,
        { bg: "bg.panel", borderRadius: "md", borderWidth: 1, key: title, px: 3, py: 3 },
        h(Text, { color: "fg.muted", fontSize: "xs" }, title),
        h(Text, { fontSize: { base: "xl", md: "2xl" }, fontVariantNumeric: "tabular-nums", fontWeight: "semibold", lineHeight: "short" }, value),
        h(Text, { color: "fg.muted", fontSize: "xs" }, help),
      ),
    ),
  );
}

function Slot({ pipeline: { slot, series, now } }) {
  const [range, setRange] = useState("3 hours");
  const first = series.at.findIndex((at) => at >= (series.at.at(-1) ?? 0) - RANGES[range]);
  const from = (name) => series[name].slice(Math.max(0, first));
  const at = from("at");
  return h(
    Panel,
    {
      title: `Slot ${slot.name}`,
      aside: h(
        Flex,
        { align: "center", gap: 3, wrap: "wrap" },
        h(Text, { color: "fg.muted", fontSize: "xs" }, [slot.wal_status, slot.active == null ? null : slot.active ? "active" : "not read", `seen ${ago(slot.at, now)}`].filter(Boolean).join(" · ")),
        h(
          NativeSelect.Root,
          { size: "xs", width: "110px" },
          h(NativeSelect.Field, { "aria-label": "Time range", onChange: (event) => setRange(event.target.value), value: range }, Object.keys(RANGES).map((key) => h("option", { key, value: key }, key))),
          h(NativeSelect.Indicator),
        ),
      ),
    },
    slot.restart_lsn && h(Ruler, { slot }),
    h(Title, null, "Retained WAL"),
    h(Chart, {
      at,
      binary: true,
      format: bytes,
      height: 170,
      limit: slot.budget_bytes && { text: `budget ${bytes(slot.budget_bytes)}`, value: slot.budget_bytes },
      palette: levelPalette(slot),
      title: "Retained WAL",
      values: from("retained_bytes"),
    }),
    h(
      SimpleGrid,
      { columnGap: 6, minChildWidth: "min(260px, 100%)", rowGap: 2 },
      h(Box, { minWidth: 0 }, h(Title, null, "Lag"), h(Chart, { at, binary: true, format: bytes, height: 120, palette: "purple", title: "Lag", values: from("lag_bytes") })),
      h(Box, { minWidth: 0 }, h(Title, null, "Rows/s"), h(Chart, { at, format: count, height: 120, palette: "green", title: "Rows per second", values: from("rows_per_second") })),
    ),
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

function Snapshot({ pipeline: { tables, snapshot } }) {
  const [all, setAll] = useState(false);
  const sum = (key) => tables.reduce((total, table) => total + table[key], 0);
  const [chunks, finished] = [sum("chunks"), sum("finished")];
  // Tables in progress come first.
  const order = [...tables].sort((a, b) => (a.finished === a.chunks) - (b.finished === b.chunks));
  const shown = all ? order : order.slice(0, FEW);
  const eta = snapshot?.eta == null ? "" : `, ${duration(snapshot.eta)} left`;
  return h(
    Panel,
    { aside: h(Text, { color: "fg.muted", fontSize: "xs" }, `${count(finished)} of ${count(chunks)} chunks, ${count(sum("rows"))} rows${eta}`), title: "Snapshot" },
    h(ProgressBar, { done: finished, label: "Chunks copied", mb: 3, whole: chunks }),
    shown.map((table) =>
      h(
        Box,
        { key: table.table, mb: 3 },
        h(
          Flex,
          { fontSize: "xs", gap: 3, justify: "space-between", mb: 1, wrap: "wrap" },
          h(Text, { fontWeight: "medium", overflowWrap: "anywhere" }, table.table),
          h(Text, { color: "fg.muted" }, `${count(table.finished)} of ${count(table.chunks)} · ${count(table.rows)} rows`),
        ),
        h(
          Flex,
          { "aria-label": `${table.table}: ${table.finished} of ${table.chunks} chunks copied`, gap: "2px", role: "img", wrap: "wrap" },
          table.cells.map(({ title, done, running }) =>
            h(Box, {
              bg: running ? "running.solid" : done === 0 ? "bg.emphasized" : "success.solid",
              borderRadius: "2px",
              boxSize: "10px",
              key: title,
              opacity: running || done === 0 ? 1 : 0.35 + 0.65 * done,
              title: `${title}: ${running ? "being copied" : done === 1 ? "copied" : done ? `${Math.round(100 * done)} % copied` : "not copied yet"}`,
            }),
          ),
        ),
      ),
    ),
    h(More, { all, number: order.length, setAll, what: "tables" }),
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
          h(Text, { fontWeight: "medium", overflowWrap: "anywhere" }, view.view),
          h(Badge, { colorPalette: VIEW_STATES[view.state]?.palette, size: "xs", title: VIEW_STATES[view.state]?.text, variant: "solid" }, view.state),
          h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, describeView(view)),
        ),
        view.built_percent < 100 && h(ProgressBar, { done: view.built_percent, label: `${view.view} built`, mt: 1, whole: 100 }),
      ),
    ),
    h(More, { all, number: views.length, setAll, what: "views" }),
  );
}

const describeView = ({ as_of, anchors_per_unit, built_percent, milliseconds_per_unit, queued, refresh, sink, units }) =>
  [
    sink,
    built_percent < 100 && `${decimal(built_percent)} % built`,
    as_of && `as of ${as_of}`,
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
  return h(
    Panel,
    { title: "Recent batches" },
    batches.length === 0
      ? h(Text, { color: "fg.muted", fontSize: "sm" }, "No batch has been applied yet.")
      : h(
          Table.ScrollArea,
          null,
          h(
            Table.Root,
            { css: { "& th, & td": { fontSize: "xs", px: 0.5, py: 1.5 } }, size: "sm" },
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
              h(Text, { color: "fg.error", fontWeight: "semibold" }, error.kind),
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

const Jobs = ({ jobs, now }) =>
  h(
    Panel,
    { title: "Jobs" },
    jobs.map((job) =>
      h(
        Flex,
        { align: "center", columnGap: 3, fontSize: "sm", key: job.part, py: 1, wrap: "wrap" },
        h(Text, { fontWeight: "medium", minWidth: "90px" }, job.part),
        h(Badge, { colorPalette: JOB_PALETTES[job.state], size: "xs", variant: "solid" }, job.state),
        h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, `${job.owner} · epoch ${job.epoch} · heartbeat ${ago(job.at, now)}`),
      ),
    ),
  );
