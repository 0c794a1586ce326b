// The tables of a pipeline, one row for each. Rows are plain elements, because there may be hundreds of them.

import { ChakraUI, React, ReactRouterDOM, h } from "./host.js";
import { ago, count, duration, moment } from "./format.js";
import { Panel, TABLE_STATES, TableBadge } from "./parts.js";

const { Box, Button, Flex, Input, Text } = ChakraUI;
const { useMemo, useState } = React;

const OPERATIONS = ["Inserts", "Updates", "Deletes"];
const FEW = 12;

const urgency = (table) => (table.cause ? -1 : Object.keys(TABLE_STATES).indexOf(table.state));

// The values by which columns are sorted; numbers from the largest.
const COLUMNS = [
  { key: "table", title: "Table", of: (t) => t.table },
  { key: "state", title: "State", of: urgency },
  { key: "rows", title: "Rows", of: (t) => t.rows, number: true },
  ...OPERATIONS.map((title, i) => ({ key: `minute ${i}`, title, group: "Per minute", of: (t) => t.per_minute?.[i], number: true })),
  ...OPERATIONS.map((title, i) => ({ key: `total ${i}`, title, group: "In total", of: (t) => t.total?.[i], number: true })),
  { key: "changed", title: "Last change", of: (t) => t.changed_at, number: true },
  { key: "delay", title: "Delay", of: (t) => t.delay, number: true },
  { key: "verified", title: "Verified", of: (t) => t.verified?.at, number: true },
];

function sorted(tables, { key, reverse }) {
  const { of, number } = COLUMNS.find((column) => column.key === key);
  const sign = reverse === Boolean(number) ? 1 : -1;
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  return [...tables].sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x == null || y == null) return (x == null) - (y == null) || a.table.localeCompare(b.table);
    return sign * order(x, y) || a.table.localeCompare(b.table);
  });
}

const STYLE = {
  borderCollapse: "collapse",
  fontSize: "xs",
  fontVariantNumeric: "tabular-nums",
  width: "100%",
  "& th, & td": { borderBottomWidth: "1px", px: 2, py: 1.5, textAlign: "end", whiteSpace: "nowrap" },
  "& th:first-of-type, & td:first-of-type, & th:nth-of-type(2), & td:nth-of-type(2)": { textAlign: "start" },
  "& th[colspan='3']": { textAlign: "center" },
  "& td:first-of-type": { fontWeight: "medium", maxWidth: "320px", overflowWrap: "anywhere", whiteSpace: "normal" },
  "& thead th": { color: "fg.muted", fontWeight: "medium" },
  "& a": { color: "fg.info" },
  "& a:hover": { textDecoration: "underline" },
};

export function Tables({ tables, now, narrow }) {
  const [text, setText] = useState("");
  const [state, setState] = useState(null);
  const [order, setOrder] = useState({ key: "state", reverse: false });
  const [all, setAll] = useState(false);
  const states = useMemo(() => {
    const found = new Map();
    tables.forEach((table) => found.set(table.state, (found.get(table.state) ?? 0) + 1));
    return [...found].sort(([a], [b]) => Object.keys(TABLE_STATES).indexOf(a) - Object.keys(TABLE_STATES).indexOf(b));
  }, [tables]);
  const shown = useMemo(() => {
    const wanted = text.trim().toLowerCase();
    return sorted(tables.filter((t) => (!state || t.state === state) && t.table.toLowerCase().includes(wanted)), order);
  }, [tables, text, state, order]);
  const listed = all ? shown : shown.slice(0, FEW);
  return h(
    Panel,
    { aside: h(Text, { color: "fg.muted", fontSize: "xs" }, `${count(tables.length)} in all, ${count(tables.reduce((sum, t) => sum + t.rows, 0))} rows`), title: "Tables" },
    h(
      Flex,
      { align: "center", gap: 2, mb: 3, wrap: "wrap" },
      h(Input, { "aria-label": "Search tables", maxWidth: narrow ? "full" : "xs", minWidth: "160px", onChange: (event) => setText(event.target.value), placeholder: "Search tables", size: "xs", type: "search", value: text }),
      states.length > 1 &&
        states.map(([each, number]) =>
          h(
            Button,
            { "aria-pressed": state === each, colorPalette: "brand", key: each, onClick: () => setState(state === each ? null : each), px: 2, size: "xs", variant: state === each ? "solid" : "outline" },
            `${TABLE_STATES[each]?.word ?? each} ${count(number)}`,
          ),
        ),
    ),
    shown.length === 0
      ? h(Text, { color: "fg.muted", fontSize: "sm", py: 3 }, tables.length ? "No table matches." : "No table is planned yet.")
      : narrow
        ? listed.map((table) => h(Line, { key: table.table, now, table }))
        : h(
            Box,
            { overflowX: "auto" },
            h(Box, { as: "table", css: STYLE }, h(Heads, { order, setOrder }), h("tbody", null, listed.map((table) => h(Row, { key: table.table, now, table })))),
          ),
    shown.length > FEW && h(Button, { mt: 2, onClick: () => setAll(!all), size: "xs", variant: "ghost" }, all ? "Show fewer" : `Show all ${count(shown.length)} tables`),
  );
}

function Heads({ order, setOrder }) {
  const groups = COLUMNS.filter((column, i) => !column.group || COLUMNS[i - 1].group !== column.group);
  return h(
    "thead",
    null,
    h("tr", null, groups.map(({ group, key }) => h("th", { colSpan: group ? OPERATIONS.length : 1, key, scope: group ? "colgroup" : undefined, style: { borderBottomWidth: 0, paddingBottom: 0 } }, group))),
    h(
      "tr",
      null,
      COLUMNS.map(({ key, title, group, number }) => {
        const active = order.key === key;
        const arrow = active ? (order.reverse === Boolean(number) ? " ↑" : " ↓") : "";
        return h(
          "th",
          { "aria-sort": active ? (arrow === " ↑" ? "ascending" : "descending") : "none", key, scope: "col" },
          h(
            "button",
            { "aria-label": group ? `${title} ${group.toLowerCase()}` : title, onClick: () => setOrder({ key, reverse: active && !order.reverse }), type: "button", style: { cursor: "pointer" } },
            title + arrow,
          ),
        );
      }),
    ),
  );
}

const Name = ({ table }) => {
  const [search] = ReactRouterDOM.useSearchParams();
  const to = new URLSearchParams(search);
  to.set("table", table);
  return h(ReactRouterDOM.Link, { to: { search: `?${to}` } }, table);
};

const progress = (table) => (["copying", "failed", "stopped", "paused", "idle"].includes(table.state) && table.finished < table.chunks ? Math.floor((100 * table.finished) / table.chunks) : null);

const rowsTitle = ({ rows, verified }) => (verified ? `${count(rows)} rows when it was verified at ${moment(verified.at)}` : `${count(rows)} rows were copied`);

const verifiedText = (verified, now) => (verified == null ? "never" : `${verified.equal ? "equal" : `${count(verified.differences)} differ`}, ${ago(verified.at, now)}`);

function Row({ table, now }) {
  const { per_minute: minute, total, changed_at: changed, delay, verified } = table;
  return h(
    "tr",
    null,
    h("td", null, h(Name, table), table.cause && h(Text, { color: "red.fg", fontWeight: "normal", lineClamp: 2, title: table.cause }, table.cause)),
    h("td", null, h(TableBadge, { percent: progress(table), state: table.state })),
    h("td", { title: rowsTitle(table) }, count(table.rows)),
    OPERATIONS.map((title, i) => h("td", { key: `minute ${title}` }, count(minute?.[i]))),
    OPERATIONS.map((title, i) => h("td", { key: `total ${title}` }, count(total?.[i]))),
    h("td", { title: changed == null ? undefined : moment(changed) }, ago(changed, now)),
    h("td", null, duration(delay)),
    h(Text, { as: "td", color: verified && !verified.equal ? "red.fg" : undefined, title: verified == null ? undefined : moment(verified.at) }, verifiedText(verified, now)),
  );
}

/** A table on a narrow screen. */
function Line({ table, now }) {
  const facts = [
    ["rows", count(table.rows)],
    ["changes/min", table.per_minute == null ? null : count(table.per_minute.reduce((sum, each) => sum + each))],
    ["last change", table.changed_at == null ? null : ago(table.changed_at, now)],
    ["verified", verifiedText(table.verified, now)],
  ].filter(([, value]) => value != null);
  return h(
    Box,
    { borderTopWidth: 1, css: { "& a": { color: "fg.info", fontWeight: "medium" } }, fontSize: "sm", py: 2 },
    h(Flex, { gap: 2, justify: "space-between" }, h(Box, { minWidth: 0, overflowWrap: "anywhere" }, h(Name, table)), h(TableBadge, { percent: progress(table), state: table.state })),
    table.cause && h(Text, { color: "red.fg", fontSize: "xs", overflowWrap: "anywhere" }, table.cause),
    h(Flex, { columnGap: 4, fontSize: "xs", mt: 1, wrap: "wrap" }, facts.map(([title, value]) => h(Text, { key: title }, h(Text, { as: "span", color: "fg.muted" }, `${title} `), value))),
  );
}
