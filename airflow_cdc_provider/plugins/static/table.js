// One table of a pipeline: what has changed in it, its chunks, columns, views and errors.

import { ChakraUI, React, ReactRouterDOM, h, usePolled } from "./host.js";
import { TableActions } from "./actions.js";
import { ago, count, duration, moment } from "./format.js";
import { Facts, Loading, Panel, Problem, Prose, TableBadge, Trail } from "./parts.js";

const { Badge, Box, Flex, Heading, SimpleGrid, Text } = ChakraUI;

const SECONDS = 5;
const IDENTITIES = { d: "primary key", i: "an index", f: "full rows" };

/**
 * @param pipeline the pipeline, as its page shows it.
 * @param {boolean} alone whether there is no list of pipelines above its page.
 */
export function TablePage({ alone, pipeline, name, reload }) {
  const { value: table, error } = usePolled(`cdc/api/pipelines/${encodeURIComponent(pipeline.name)}/tables/${encodeURIComponent(name)}`, SECONDS);
  const trail = h(Trail, { links: [...(alone ? [] : [["All pipelines", ""]]), [pipeline.name, `?pipeline=${encodeURIComponent(pipeline.name)}`]], name });
  if (!table) return h(Box, null, trail, error ? h(Problem, { error, title: `${name} cannot be shown` }) : h(Loading));
  return h(
    Flex,
    { direction: "column", gap: 4, minWidth: 0 },
    h(
      Box,
      null,
      trail,
      h(
        Flex,
        { align: "center", gap: 3, wrap: "wrap" },
        h(Heading, { as: "h1", overflowWrap: "anywhere", size: "xl" }, table.table),
        h(TableBadge, { state: table.state }),
        h(Box, { flex: 1 }),
        h(TableActions, { pipeline, reload, table }),
      ),
      h(Text, { color: "fg.muted", fontSize: "xs", mt: 1, overflowWrap: "anywhere" }, `${pipeline.name} · copied to ${table.targets.join(", ") || "the sink"}`),
    ),
    error && h(Problem, { error, status: "warning", title: "The server does not answer; the data shown may be outdated" }),
    table.cause && h(Problem, { error: pipeline.error }),
    h(Facts, { facts: factsOf(table) }),
    h(Chunks, { table }),
    h(
      SimpleGrid,
      { alignItems: "start", columns: { base: 1, lg: 2 }, gap: 4 },
      h(Shape, { shape: table.shape }),
      h(
        Flex,
        { direction: "column", gap: 4, minWidth: 0 },
        h(Views, { views: table.views }),
        h(History, { table }),
      ),
    ),
  );
}

const three = (numbers) => (numbers == null ? "–" : numbers.map(count).join(" / "));

const factsOf = ({ rows, per_minute, total, changed_at, delay, verified, now }) => [
  ["Rows", count(rows), verified ? `verified ${ago(verified.at, now)}` : "copied"],
  ["Per minute", three(per_minute), "inserts / updates / deletes"],
  ["In total", three(total), "inserts / updates / deletes"],
  ["Last change", ago(changed_at, now), changed_at == null ? "none seen" : `in the sink ${duration(delay)} after its commit`],
  ["Verified", verified == null ? "never" : verified.equal ? "equal" : `${count(verified.differences)} differ`, verified == null ? "press Verify" : ago(verified.at, now)],
];

const Chunks = ({ table }) =>
  h(
    Panel,
    { aside: h(Text, { color: "fg.muted", fontSize: "xs" }, `${count(table.finished)} of ${count(table.chunks)} copied`), title: "Chunks" },
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
  );

const Shape = ({ shape }) =>
  h(
    Panel,
    { aside: shape && h(Text, { color: "fg.muted", fontSize: "xs" }, `replica identity: ${IDENTITIES[shape.replica_identity] ?? shape.replica_identity}`), title: "Columns" },
    shape == null
      ? h(Text, { color: "fg.muted", fontSize: "sm" }, "Known after the next run.")
      : h(
          React.Fragment,
          null,
          shape.columns.map(([column, type, required]) =>
            h(
              Flex,
              { align: "center", columnGap: 3, fontSize: "sm", key: column, py: 0.5, wrap: "wrap" },
              h(Text, { fontWeight: "medium", overflowWrap: "anywhere" }, column),
              h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, required ? `${type} not null` : type),
              shape.key.includes(column) && h(Badge, { size: "xs" }, "key"),
            ),
          ),
          shape.key.length === 0 && h(Text, { color: "fg.muted", fontSize: "xs", mt: 2 }, "The table has no key."),
          h(Text, { color: "fg.muted", fontSize: "xs", mt: 2 }, "As of the start of the last run."),
        ),
  );

const Views = ({ views }) =>
  h(
    Panel,
    { title: "Views that read it" },
    views.length === 0
      ? h(Text, { color: "fg.muted", fontSize: "sm" }, "None.")
      : views.map(({ view, state }, i) => h(Flex, { gap: 3, key: `${view} ${i}`, py: 0.5 }, h(Text, { fontSize: "sm", overflowWrap: "anywhere" }, view), h(Text, { color: "fg.muted", fontSize: "xs" }, state))),
  );

const History = ({ table: { errors, rereads, verified } }) => {
  const events = [
    ...errors.map((error) => ({ at: error.at, color: "red.fg", text: `${error.kind}: ${error.message}` })),
    ...rereads.map(({ at, rows }) => ({ at, text: `${count(rows)} rows were read again` })),
    ...(verified ? [{ at: verified.at, color: verified.equal ? undefined : "red.fg", text: verified.equal ? `${count(verified.rows)} rows, all equal` : `${count(verified.differences)} rows differ` }] : []),
  ].sort((a, b) => b.at - a.at);
  return h(
    Panel,
    { title: "History" },
    events.length === 0
      ? h(Text, { color: "fg.muted", fontSize: "sm" }, "Nothing yet.")
      : events.map(({ at, color, text }) => h(Box, { fontSize: "sm", key: `${at} ${text}`, py: 1 }, h(Text, { color: "fg.muted", fontSize: "xs" }, moment(at)), h(Prose, { color, text }))),
  );
};

export const useTable = () => ReactRouterDOM.useSearchParams()[0].get("table");
