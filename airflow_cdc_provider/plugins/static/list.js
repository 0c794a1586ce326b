// All pipelines, one row for each; those that need attention come first.

import { ChakraUI, React, ReactRouterDOM, h } from "./host.js";
import { Spark } from "./chart.js";
import { ago, bytes, count, duration, soon } from "./format.js";
import { BudgetBar, PageLink, ProgressBar, STATES, StateBadge, levelPalette, urgency } from "./parts.js";

const { Box, Button, ButtonGroup, Flex, Input, Link, Table, Text } = ChakraUI;
const { useMemo, useState } = React;

const GROUPS = { attention: "Need attention", running: "Running", idle: "Idle" };

// The values that a column shows and is sorted by; numbers are sorted from the largest.
const COLUMNS = [
  { key: "name", title: "Pipeline", of: (p) => p.name },
  { key: "state", title: "State", of: urgency },
  { key: "tables", title: "Tables", of: (p) => tablesText(p) },
  { key: "sink", title: "Sink", of: (p) => sinksText(p) },
  { key: "dag", title: "Dag", of: (p) => p.dag_id },
  { key: "lag", title: "Lag", of: (p) => p.lag_seconds ?? p.lag_messages ?? p.lag_bytes, number: true },
  { key: "rate", title: "Rows/s", of: (p) => p.rows_per_second, number: true },
  { key: "retained", title: "Retained log", of: (p) => p.slot?.retained_bytes, number: true },
  { key: "seen", title: "Last seen", of: (p) => p.seen_at, number: true },
];

const compare = (a, b) => (a == null ? (b == null ? 0 : 1) : b == null ? -1 : typeof a === "string" ? a.localeCompare(b) : a - b);

function sorted(pipelines, { key, reverse }) {
  const { of, number } = COLUMNS.find((column) => column.key === key);
  const sign = reverse === Boolean(number) ? 1 : -1;
  const known = (a, b) => (of(a) == null || of(b) == null ? compare(of(a), of(b)) : sign * compare(of(a), of(b)));
  return [...pipelines].sort((a, b) => known(a, b) || urgency(a) - urgency(b) || compare(a.name, b.name));
}

/** @param {(pipeline) => string} to the address of a pipeline's page. */
export function PipelineList({ pipelines, now, to, narrow }) {
  const [text, setText] = useState("");
  const [group, setGroup] = useState(null);
  const [order, setOrder] = useState({ key: "state", reverse: false });
  const shown = useMemo(() => {
    const wanted = text.trim().toLowerCase();
    const found = pipelines.filter(
      (p) => (!group || STATES[p.state].group === group) && (!wanted || [p.name, p.state, p.by, p.dag_id, p.slot?.name, sinksText(p), tablesText(p)].join(" ").toLowerCase().includes(wanted)),
    );
    return sorted(found, order);
  }, [pipelines, text, group, order]);
  const size = (each) => pipelines.filter((p) => STATES[p.state].group === each).length;
  return h(
    React.Fragment,
    null,
    h(
      Flex,
      { align: "center", gap: 3, mb: 3, wrap: "wrap" },
      h(
        ButtonGroup,
        { "aria-label": "Filter pipelines", attached: true, role: "group", size: narrow ? "xs" : "sm", variant: "outline" },
        [[null, "All", pipelines.length], ...Object.entries(GROUPS).map(([key, title]) => [key, title, size(key)])].map(([key, title, number]) =>
          h(
            Button,
            { "aria-pressed": group === key, colorPalette: "brand", key: title, onClick: () => setGroup(key), px: narrow ? 1.5 : 3, variant: group === key ? "solid" : "outline" },
            narrow && key === "attention" ? "Attention" : title,
            h(Text, { as: "span", opacity: 0.75 }, number),
          ),
        ),
      ),
      pipelines.length > 1 &&
        h(Input, { "aria-label": "Search pipelines", flex: 1, maxWidth: narrow ? "full" : "sm", minWidth: "160px", onChange: (event) => setText(event.target.value), placeholder: "Search pipelines", size: "sm", type: "search", value: text }),
    ),
    shown.length === 0
      ? h(Text, { color: "fg.muted", py: 8, textAlign: "center" }, "No pipeline matches.")
      : narrow
        ? shown.map((p) => h(Line, { key: p.file, now, pipeline: p, to }))
        : h(Lines, { now, order, pipelines: shown, setOrder, to }),
  );
}

function Lines({ pipelines, now, to, order, setOrder }) {
  return h(
    Table.Root,
    { size: "sm" },
    h(
      Table.Header,
      null,
      h(
        Table.Row,
        null,
        COLUMNS.map(({ key, title, number }) => {
          const active = order.key === key;
          const arrow = active ? (order.reverse === Boolean(number) ? " ↑" : " ↓") : "";
          return h(
            Table.ColumnHeader,
            { "aria-sort": active ? (arrow === " ↑" ? "ascending" : "descending") : "none", key, textAlign: number ? "end" : "start" },
            h(
              Button,
              { fontWeight: "semibold", height: "auto", minWidth: 0, onClick: () => setOrder({ key, reverse: active && !order.reverse }), p: 0, size: "sm", variant: "plain" },
              title + arrow,
            ),
          );
        }),
      ),
    ),
    h(
      Table.Body,
      null,
      pipelines.map((p) =>
        h(
          Table.Row,
          { key: p.file },
          h(Table.Cell, { maxWidth: "360px" }, h(Name, { pipeline: p, to }), h(Remark, { now, pipeline: p })),
          h(Table.Cell, null, h(StateBadge, { now, pipeline: p }), h(SnapshotProgress, { snapshot: p.snapshot })),
          h(Table.Cell, { maxWidth: "200px" }, h(Text, { lineClamp: 2, overflowWrap: "anywhere", title: p.captured?.join(", ") }, tablesText(p))),
          h(Table.Cell, null, sinksText(p)),
          h(Table.Cell, { maxWidth: "200px", overflowWrap: "anywhere" }, p.dag_id && h(PageLink, { to: `/dags/${p.dag_id}` }, p.dag_id), p.next_run && h(Text, { color: "fg.muted", fontSize: "xs" }, `next run ${soon(p.next_run, now)}`)),
          h(Table.Cell, { textAlign: "end", whiteSpace: "nowrap" }, lagText(p)),
          h(Table.Cell, { textAlign: "end" }, count(p.rows_per_second)),
          h(Table.Cell, { textAlign: "end" }, h(Retained, { pipeline: p })),
          h(Table.Cell, { color: "fg.muted", textAlign: "end", whiteSpace: "nowrap" }, ago(p.seen_at, now)),
        ),
      ),
    ),
  );
}

/** A pipeline on a narrow screen. */
function Line({ pipeline: p, now, to }) {
  const facts = [
    p.captured && ["tables", tablesText(p)],
    p.sinks && ["to", sinksText(p)],
    lagText(p) !== "–" && ["lag", lagText(p)],
    p.rows_per_second != null && ["rows/s", count(p.rows_per_second)],
    p.slot?.retained_bytes != null && ["retains", bytes(p.slot.retained_bytes)],
    STATES[p.state].group !== "running" && p.seen_at != null && ["seen", ago(p.seen_at, now)],
  ].filter(Boolean);
  return h(
    Box,
    { borderTopWidth: 1, py: 2 },
    h(Flex, { align: "center", gap: 2, justify: "space-between" }, h(Name, { pipeline: p, to }), h(StateBadge, { now, pipeline: p })),
    h(Remark, { now, pipeline: p }),
    facts.length > 0 &&
      h(
        Flex,
        { columnGap: 4, fontSize: "xs", mt: 1, wrap: "wrap" },
        facts.map(([title, text]) => h(Text, { key: title }, h(Text, { as: "span", color: "fg.muted" }, `${title} `), text)),
      ),
    p.slot?.retained_bytes != null && h(BudgetBar, { mt: 1.5, slot: p.slot }),
    h(SnapshotProgress, { snapshot: p.snapshot }),
  );
}

const lagText = (p) => (p.lag_messages != null ? `${count(p.lag_messages)} messages` : p.lag_seconds != null ? duration(p.lag_seconds) : bytes(p.lag_bytes));

const tablesText = ({ captured }) => (captured == null ? "" : captured.length > 2 && captured.every((name) => !/[*?[]/.test(name)) ? `${captured.length} tables` : captured.join(", "));

const sinksText = ({ sinks }) => sinks?.map(({ type, mode }) => `${type} (${mode})`).join(", ") ?? "";

const Name = ({ pipeline, to }) =>
  h(
    Link,
    { asChild: true, color: "fg.info", fontWeight: "semibold", minWidth: 0 },
    h(ReactRouterDOM.Link, { style: { overflow: "hidden", textOverflow: "ellipsis" }, to: to(pipeline) }, pipeline.name),
  );

const Remark = ({ pipeline: { error, waiting, last_error: last }, now }) => {
  const text = error?.message ?? waiting ?? (last && `${ago(last.at, now)}: ${last.message}`);
  return text && h(Text, { color: error ? "red.fg" : waiting ? "orange.fg" : "fg.muted", fontSize: "xs", lineClamp: 2, overflowWrap: "anywhere", title: text }, text);
};

const SnapshotProgress = ({ snapshot }) =>
  snapshot &&
  h(
    Box,
    { mt: 1, width: "100%" },
    h(ProgressBar, { done: snapshot.finished, label: "Chunks copied", whole: snapshot.chunks }),
    h(Text, { color: "fg.muted", fontSize: "xs", mt: 0.5 }, `${snapshot.finished} of ${snapshot.chunks} chunks${snapshot.eta == null ? "" : `, ${duration(snapshot.eta)} left`}`),
  );

const Retained = ({ pipeline: { slot, trend } }) =>
  slot?.retained_bytes == null
    ? "–"
    : h(
        Flex,
        { align: "center", gap: 3, justify: "flex-end" },
        h(Spark, { palette: levelPalette(slot), values: trend }),
        h(Box, { width: "84px" }, h(Text, { whiteSpace: "nowrap" }, bytes(slot.retained_bytes)), h(BudgetBar, { mt: 1, slot })),
      );
