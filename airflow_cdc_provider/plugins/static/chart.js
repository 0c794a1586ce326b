// Charts over time, drawn as SVG in the colors of Airflow's theme.

import { ChakraUI, React, h, useWidth } from "./host.js";
import { clock, moment } from "./format.js";

const { Box, Flex, Text } = ChakraUI;
const { useState } = React;

const MARGIN = { top: 10, right: 8, bottom: 20, left: 62 };
// If an interval without samples is longer than usual by this factor, no job was running.
const GAP = 6;

const color = (token) => `var(--chakra-colors-${token.replace(".", "-")})`;
const label = { fontSize: "11px", fill: color("fg.muted") };

/** Round steps for an axis up to `top`; steps of bytes are powers of two. */
function ticks(top, binary) {
  const rough = top / 3 || 1;
  const base = binary ? 1024 ** Math.floor(Math.log2(rough) / 10) : 10 ** Math.floor(Math.log10(rough));
  const factors = binary ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 5, 10];
  const step = base * factors.find((factor) => factor * base >= rough);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
}

function timeTicks(from, to, width) {
  const steps = [10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800];
  const step = steps.find((each) => (to - from) / each <= Math.max(2, width / 90)) ?? 172800;
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((from - offset) / step) * step + offset;
  return { step, at: Array.from({ length: Math.max(0, Math.floor((to - first) / step) + 1) }, (_, i) => first + i * step) };
}

/** The parts of a line between intervals without samples. */
function stretches(points) {
  const gaps = points.slice(1).map((point, i) => point[0] - points[i][0]);
  const usual = [...gaps].sort((a, b) => a - b)[gaps.length >> 1] ?? 0;
  const found = [];
  points.forEach((point, i) => {
    // Older samples are further apart, so a gap must also be longer than its neighbors.
    const near = Math.max(usual, gaps[i - 2] ?? 0, gaps[i] ?? 0);
    if (i === 0 || gaps[i - 1] > GAP * near) found.push([]);
    found.at(-1).push(point);
  });
  return found;
}

/**
 * One quantity over time.
 *
 * @param {number[]} at seconds since 1970, ascending.
 * @param {(number|null)[]} values
 * @param {(value: number) => string} format
 * @param {{value: number, text: string}} [limit] a horizontal line; left out if the values are far below it.
 */
export function Chart({ title, at, values, format, binary = false, limit, palette = "blue", height = 150 }) {
  const [ref, width] = useWidth();
  const [hovered, setHovered] = useState(null);
  const points = at.map((time, i) => [time, values[i]]).filter(([, value]) => value != null);
  return h(
    Box,
    { ref, minWidth: 0, position: "relative", width: "100%" },
    points.length < 2
      ? h(Flex, { align: "center", color: "fg.muted", height: `${height}px`, justify: "center" }, h(Text, { fontSize: "sm" }, "Not enough samples yet."))
      : width > 0 && h(Plot, { title, points, format, binary, limit, palette, height, width, hovered, setHovered }),
  );
}

function Plot({ title, points, format, binary, limit, palette, height, width, hovered, setHovered }) {
  const from = points[0][0];
  const to = points.at(-1)[0];
  const most = Math.max(...points.map(([, value]) => value));
  const shown = limit && limit.value <= 4 * most ? limit : null;
  const top = 1.15 * Math.max(shown ? shown.value : 0, most, binary ? 1024 : 4);
  const [right, bottom] = [width - MARGIN.right, height - MARGIN.bottom];
  const x = (time) => MARGIN.left + ((right - MARGIN.left) * (time - from)) / (to - from || 1);
  const y = (value) => bottom - ((bottom - MARGIN.top) * value) / top;
  const line = (stretch) => stretch.map(([time, value], i) => `${i ? "L" : "M"}${x(time).toFixed(1)},${y(value).toFixed(1)}`).join("");
  const parts = stretches(points);
  const times = timeTicks(from, to, right - MARGIN.left);
  const last = points.at(-1);
  const hover = (event) => {
    const time = from + ((to - from) * (event.nativeEvent.offsetX - MARGIN.left)) / (right - MARGIN.left);
    setHovered(points.reduce((best, point) => (Math.abs(point[0] - time) < Math.abs(best[0] - time) ? point : best)));
  };
  const stroke = color(`${palette}.border`);
  return h(
    React.Fragment,
    null,
    h(
      "svg",
      {
        width,
        height,
        role: "img",
        "aria-label": `${title}: ${format(last[1])} at ${clock(last[0])}, at most ${format(most)}${limit ? `; ${limit.text}` : ""}`,
        onPointerMove: hover,
        onPointerLeave: () => setHovered(null),
        style: { display: "block", touchAction: "pan-y" },
      },
      ticks(top, binary).map((value) =>
        h(
          "g",
          { key: value },
          h("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value), style: { stroke: color("border.muted") } }),
          h("text", { x: MARGIN.left - 6, y: y(value) + 4, textAnchor: "end", style: label }, format(value)),
        ),
      ),
      times.at.map((time) =>
        h(
          "text",
          { key: time, x: Math.min(right - 16, Math.max(MARGIN.left + 12, x(time))), y: height - 4, textAnchor: "middle", style: label },
          times.step >= 86400 ? moment(time).split(",")[0] : clock(time).slice(0, times.step < 60 ? 8 : 5),
        ),
      ),
      parts.map((part) =>
        h("path", {
          key: `area ${part[0][0]}`,
          d: `${line(part)}L${x(part.at(-1)[0]).toFixed(1)},${bottom}L${x(part[0][0]).toFixed(1)},${bottom}Z`,
          style: { fill: stroke, opacity: 0.15 },
        }),
      ),
      parts.map((part) => h("path", { key: part[0][0], d: line(part), fill: "none", style: { stroke, strokeWidth: 1.5, strokeLinejoin: "round" } })),
      shown &&
        h(
          "g",
          null,
          h("line", { x1: MARGIN.left, x2: right, y1: y(shown.value), y2: y(shown.value), style: { stroke: color("red.border"), strokeDasharray: "5 4" } }),
          h("text", { x: right - 2, y: y(shown.value) + 13, textAnchor: "end", style: { ...label, fill: color("red.fg") } }, shown.text),
        ),
      hovered &&
        h(
          "g",
          { pointerEvents: "none" },
          h("line", { x1: x(hovered[0]), x2: x(hovered[0]), y1: MARGIN.top, y2: bottom, style: { stroke: color("border.emphasized") } }),
          h("circle", { cx: x(hovered[0]), cy: y(hovered[1]), r: 3.5, style: { fill: stroke } }),
        ),
    ),
    hovered &&
      h(
        Box,
        {
          bg: "bg.panel",
          borderRadius: "sm",
          borderWidth: 1,
          fontSize: "xs",
          left: `${Math.min(Math.max(0, x(hovered[0]) + (x(hovered[0]) > width / 2 ? -150 : 8)), width - 142)}px`,
          pointerEvents: "none",
          position: "absolute",
          px: 2,
          py: 1,
          shadow: "sm",
          top: 0,
          width: "142px",
        },
        h(Text, { fontWeight: "semibold" }, format(hovered[1])),
        h(Text, { color: "fg.muted" }, moment(hovered[0])),
      ),
  );
}

/** A sparkline of a few values, for a row of a table. */
export function Spark({ values, palette = "blue", width = 72, height = 20 }) {
  if (values.length < 2) return null;
  const top = Math.max(...values) || 1;
  const d = values
    .map((value, i) => `${i ? "L" : "M"}${((width * i) / (values.length - 1)).toFixed(1)},${(height - 1 - ((height - 2) * value) / top).toFixed(1)}`)
    .join("");
  return h(
    "svg",
    { width, height, "aria-hidden": true, style: { display: "block", flexShrink: 0 } },
    h("path", { d: `${d}L${width},${height}L0,${height}Z`, style: { fill: color(`${palette}.border`), opacity: 0.15 } }),
    h("path", { d, fill: "none", style: { stroke: color(`${palette}.border`), strokeWidth: 1.25 } }),
  );
}
