// Components that the list and the page of one pipeline share.

import { ChakraUI, React, ReactRouterDOM, h } from "./host.js";
import { bytes, share, soon } from "./format.js";

const { Alert, Badge, Box, Code, EmptyState, Flex, Link, SimpleGrid, Spinner, Text } = ChakraUI;

// The palettes are those of Airflow's task states. States are ordered by urgency.
export const STATES = {
  failed: { palette: "failed", group: "attention", text: "It does not continue until you resolve the problem" },
  invalid: { palette: "failed", group: "attention", text: "The pipeline file is invalid" },
  unreadable: { palette: "failed", group: "attention", text: "Its state cannot be read" },
  restarting: { palette: "up_for_retry", group: "attention", text: "Its job waits for the next attempt" },
  starting: { palette: "scheduled", group: "running", text: "A job has been submitted but has not reported yet" },
  copying: { palette: "running", group: "running", text: "Tables are being copied" },
  "reading again": { palette: "running", group: "running", text: "Tables are being read again" },
  "catching up": { palette: "running", group: "running", text: "The stream applies changes that are more than a minute old" },
  live: { palette: "success", group: "running", text: "Changes are applied as they come" },
  stopped: { palette: "queued", group: "idle", text: "A user has stopped it" },
  paused: { palette: "queued", group: "idle", text: "No job is running, and its Dag is paused" },
  idle: { palette: "queued", group: "idle", text: "No job is running" },
  new: { palette: "none", group: "idle", text: "Nothing has run yet" },
};

/** States of a table; those of the pipeline that do not mean the same for a table have another word. */
export const TABLE_STATES = {
  ...STATES,
  failed: { ...STATES.failed, word: "stopped", text: "The pipeline has stopped because of an error" },
  waiting: { palette: "scheduled", text: "It has not been copied yet" },
  copied: { palette: "queued", text: "It is copied, and its changes follow once the stream runs" },
  "reading again": { palette: "running", text: "Its rows are being read again" },
};

export const urgency = (pipeline) => Object.keys(STATES).indexOf(pipeline.state);

export const AT_WORK = Object.keys(STATES).filter((state) => STATES[state].group === "running" || state === "restarting");

/** The state in words: who has stopped the pipeline, and when it runs next. */
export const describeState = ({ state, by, next_run }, now) =>
  [state, state === "stopped" && by && `by ${by}`, state === "idle" && next_run && `until ${soon(next_run, now)}`].filter(Boolean).join(" ");

export const StateBadge = ({ pipeline, now }) =>
  h(
    Badge,
    { colorPalette: STATES[pipeline.state].palette, title: pipeline.by && pipeline.state !== "stopped" ? `${STATES[pipeline.state].text}; stopped by ${pipeline.by}` : STATES[pipeline.state].text, variant: "solid" },
    describeState(pipeline, now),
  );

export const TableBadge = ({ state, percent }) =>
  h(Badge, { colorPalette: TABLE_STATES[state]?.palette, size: "xs", title: TABLE_STATES[state]?.text, variant: "solid" }, `${TABLE_STATES[state]?.word ?? state}${percent == null ? "" : ` ${percent} %`}`);

/** An error message and its solution; both may have code between backquotes. */
export function Problem({ error, status = "error", note, title = error.kind }) {
  return h(
    Alert.Root,
    { alignItems: "flex-start", role: status === "error" ? "alert" : "status", status },
    h(Alert.Indicator),
    h(
      Alert.Content,
      { minWidth: 0, overflowWrap: "anywhere" },
      h(Alert.Title, null, note ? `${title} – ${note}` : title),
      h(Alert.Description, null, h(Prose, { text: error.message }), error.solution && h(Prose, { fontWeight: "medium", mt: 1, text: error.solution })),
    ),
  );
}

export const Prose = ({ text, ...style }) =>
  h(
    Text,
    { as: "div", overflowWrap: "anywhere", whiteSpace: "pre-line", ...style },
    text.split("`").map((piece, i) => (i % 2 ? h(Code, { display: "inline", key: i, overflowWrap: "anywhere", size: "sm", variant: "surface" }, piece) : piece)),
  );

const LEVELS = { ok: "blue", warning: "orange", exceeded: "red" };
export const levelPalette = (slot) => LEVELS[slot.level] ?? "blue";

/** A bar that is full if the slot retains as much log as its budget allows. */
export function BudgetBar({ slot, ...style }) {
  const part = share(slot.retained_bytes, slot.budget_bytes);
  return h(
    Box,
    {
      "aria-label": `${bytes(slot.retained_bytes)} of a budget of ${bytes(slot.budget_bytes)}`,
      "aria-valuemax": 100,
      "aria-valuemin": 0,
      "aria-valuenow": Math.round(part),
      bg: "bg.emphasized",
      borderRadius: "full",
      height: "4px",
      overflow: "hidden",
      role: "meter",
      ...style,
    },
    h(Box, { bg: `${levelPalette(slot)}.solid`, height: "100%", width: `${part}%` }),
  );
}

export const ProgressBar = ({ done, whole, label, ...style }) =>
  h(
    Box,
    { "aria-label": label, "aria-valuemax": whole, "aria-valuemin": 0, "aria-valuenow": done, bg: "bg.emphasized", borderRadius: "full", height: "6px", overflow: "hidden", role: "progressbar", ...style },
    h(Box, { bg: "success.solid", height: "100%", width: `${share(done, whole)}%` }),
  );

export const Nothing = ({ title, children }) =>
  h(
    EmptyState.Root,
    { px: 0 },
    h(EmptyState.Content, { minWidth: 0 }, h(EmptyState.Title, null, title), h(EmptyState.Description, { as: "div", maxWidth: "min(36rem, 100%)", textAlign: "center" }, children)),
  );

/** A titled box. */
export const Panel = ({ title, aside, children, ...style }) =>
  h(
    Box,
    { as: "section", "aria-label": title, bg: "bg.panel", borderRadius: "md", borderWidth: 1, minWidth: 0, p: { base: 3, md: 4 }, ...style },
    h(Flex, { align: "baseline", gap: 3, justify: "space-between", mb: 3, wrap: "wrap" }, h(Text, { as: "h2", fontSize: "sm", fontWeight: "semibold" }, title), aside),
    children,
  );

/** Figures with a title above and a remark below. */
export const Facts = ({ facts }) =>
  h(
    SimpleGrid,
    { gap: 3, minChildWidth: "135px" },
    facts.map(([title, value, help]) =>
      h(
        Box,
        { bg: "bg.panel", borderRadius: "md", borderWidth: 1, key: title, px: 3, py: 3 },
        h(Text, { color: "fg.muted", fontSize: "xs" }, title),
        h(Text, { fontSize: "xl", fontVariantNumeric: "tabular-nums", fontWeight: "semibold", lineHeight: "short" }, value),
        h(Text, { color: "fg.muted", fontSize: "xs" }, help),
      ),
    ),
  );

export const Loading = () => h(Flex, { justify: "center", p: 10 }, h(Spinner, { "aria-label": "Loading" }));

/** @param links titles and search parameters of the pages above this one. */
export const Trail = ({ links, name }) =>
  h(
    Flex,
    { "aria-label": "Breadcrumb", as: "nav", fontSize: "sm", gap: 2, mb: 1, wrap: "wrap" },
    links.map(([title, search]) =>
      h(
        React.Fragment,
        { key: title },
        h(Link, { asChild: true, color: "fg.info" }, h(ReactRouterDOM.Link, { to: { search } }, title)),
        h(Text, { "aria-hidden": true, color: "fg.muted" }, "/"),
      ),
    ),
    h(Text, { color: "fg.muted", overflowWrap: "anywhere" }, name),
  );

/** What only operators need, closed at first. */
export const Details = ({ title, children }) =>
  h(Box, { as: "details", mt: 3 }, h(Box, { as: "summary", color: "fg.muted", cursor: "pointer", fontSize: "xs" }, title), h(Box, { mt: 2 }, children));

/** A link to a page of Airflow. */
export const PageLink = ({ to, children }) => h(Link, { asChild: true, color: "fg.info" }, h(ReactRouterDOM.Link, { to }, children));
