// Components that the list and the page of one pipeline share.

import { ChakraUI, h } from "./host.js";
import { bytes, share } from "./format.js";

const { Alert, Badge, Box, Code, EmptyState, Flex, Text } = ChakraUI;

// The palettes are those of Airflow's task states. States are ordered by urgency.
export const STATES = {
  "needs attention": { palette: "failed", group: "attention", text: "It does not continue until you resolve the problem" },
  invalid: { palette: "failed", group: "attention", text: "The pipeline file is invalid" },
  unreadable: { palette: "failed", group: "attention", text: "Its state cannot be read" },
  restarting: { palette: "up_for_retry", group: "attention", text: "Its job waits for the next attempt" },
  starting: { palette: "scheduled", group: "running", text: "A job has been submitted but has not reported yet" },
  snapshotting: { palette: "running", group: "running", text: "Tables are being copied" },
  streaming: { palette: "success", group: "running", text: "Changes are applied continuously" },
  stopped: { palette: "queued", group: "idle", text: "No job is running" },
  new: { palette: "none", group: "idle", text: "Nothing has run yet" },
};

export const urgency = (pipeline) => Object.keys(STATES).indexOf(pipeline.state);

export const StateBadge = ({ state }) => h(Badge, { colorPalette: STATES[state].palette, title: STATES[state].text, variant: "solid" }, state);

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
