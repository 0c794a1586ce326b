// Formats numbers and times for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NONE = "–";

export const bytes = (count) => {
  if (count == null) return NONE;
  const power = count < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(count) / 10));
  const size = count / 2 ** (10 * power);
  return `${power === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${UNITS[power]}`;
};

export const count = (number) => (number == null ? NONE : Math.round(number).toLocaleString("en-US"));

export const decimal = (number) => (number == null ? NONE : number.toLocaleString("en-US", { maximumFractionDigits: 1 }));

export const duration = (seconds) => {
  if (seconds == null) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const [unit, small, size] = seconds < 3600 ? ["min", "s", 60] : seconds < 86400 ? ["h", "min", 3600] : ["d", "h", 86400];
  const rest = Math.floor((seconds % size) / (size === 86400 ? 3600 : size / 60));
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${small}` : ""}`;
};

export const ago = (at, now) => {
  if (at == null) return NONE;
  const seconds = Math.round(now - at);
  return seconds < 3 ? "now" : `${seconds < 60 ? `${seconds} s` : duration(seconds)} ago`;
};

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const moment = (at) =>
  new Date(at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** A moment to come: the time, with the day unless it is within a day. */
export const soon = (at, now) => (at - now < 86400 ? clock(at).slice(0, 5) : moment(at).replace(/:\d\d$/, ""));

export const share = (part, whole) => (whole ? Math.min(100, (100 * part) / whole) : 0);
