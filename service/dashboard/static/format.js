// Numbers, times and sizes as people read them. Knows nothing of the page.

export const NONE = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function percent(share, digits = 1) {
  return isNumber(share) ? `${(share * 100).toFixed(digits)} %` : NONE;
}

export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

/** Three digits and a unit: 1,234,567 is 1.23 M. */
export function compact(value) {
  if (!isNumber(value)) return NONE;
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    const scale = unit === "k" ? 1e3 : size;
    if (value >= size) return `${(value / scale).toPrecision(3)} ${unit}`;
  }
  return count(value);
}

export function perSecond(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0";
  return `${value < 10 ? value.toFixed(1) : compact(value)}/s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit > 1 && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function duration(value) {
  if (!isNumber(value)) return NONE;
  const [days, hours] = [Math.floor(value / 86400), Math.floor(value / 3600) % 24];
  const [minutes, rest] = [Math.floor(value / 60) % 60, Math.floor(value) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

export function ago(at, now) {
  const value = Math.max(0, now - at);
  if (value < 1) return "now";
  if (value < 60) return `${Math.floor(value)} s ago`;
  if (value < 3600) return `${Math.floor(value / 60)} min ago`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ago`;
  return `${Math.floor(value / 86400)} d ago`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(at, withSeconds = true) {
  const date = new Date(at * 1000);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return withSeconds ? `${time}:${two(date.getSeconds())}` : time;
}

/** With the day, unless it is today. */
export function moment(at, now) {
  const [then, today] = [new Date(at * 1000), new Date(now * 1000)];
  if (then.toDateString() === today.toDateString()) return clock(at);
  return `${then.getFullYear()}-${two(then.getMonth() + 1)}-${two(then.getDate())} ${clock(at)}`;
}
