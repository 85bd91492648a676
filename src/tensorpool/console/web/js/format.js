// SPDX-License-Identifier: Apache-2.0
// How the page writes numbers, sizes, ages and shapes: as src/tensorpool/cli/format.py does in a terminal.

export const NOTHING = "–";
const MIB = 2 ** 20;
const SIZES = [
  ["TiB", 2 ** 40],
  ["GiB", 2 ** 30],
  ["MiB", MIB],
  ["KiB", 2 ** 10],
];
const AGES = [
  [100, 1, "s"],
  [6000, 60, "min"],
  [100 * 3600, 3600, "h"],
]; // up to so many seconds, in this unit

const isMissing = (value) => value === null || value === undefined;

export function number(value) {
  if (isMissing(value)) return NOTHING;
  const size = Math.abs(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 10 || size === 0 ? 1 : 2);
}

export const integer = (value) => (isMissing(value) ? NOTHING : String(value));

export const mib = (bytes) => (isMissing(bytes) ? NOTHING : number(bytes / MIB));

export function size(bytes) {
  if (isMissing(bytes)) return NOTHING;
  for (const [unit, scale] of SIZES) if (bytes >= scale) return `${number(bytes / scale)} ${unit}`;
  return `${bytes} B`;
}

export function age(ns) {
  if (isMissing(ns)) return NOTHING;
  const seconds = ns / 1e9;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  for (const [limit, scale, unit] of AGES) {
    const value = seconds / scale;
    if (seconds < limit) return `${value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(seconds / 86400)} d`;
}

export const shape = (extents) => (extents.length ? extents.join("×") : "scalar");

export const frame = (stream) =>
  isMissing(stream.shape) || isMissing(stream.dtype) ? NOTHING : `${shape(stream.shape)} ${stream.dtype}`;

// Epochs of a new host begin with the time in nanoseconds: only their last digits differ.
export function epoch(value) {
  const text = integer(value);
  return text.length <= 7 ? text : `…${text.slice(-6)}`;
}

export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// The most frequent first: "overwritten 12, gap 3"; empty where all are 0.
export const counts = (byReason) =>
  Object.entries(byReason)
    .filter(([, count]) => count)
    .sort((one, other) => other[1] - one[1])
    .map(([reason, count]) => `${reason} ${count}`)
    .join(", ");

export function percent(share) {
  if (isMissing(share) || Number.isNaN(share)) return NOTHING;
  return share > 0 && share < 0.0005 ? "< 0.05 %" : `${Number((100 * share).toPrecision(2))} %`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(ns) {
  const time = new Date(ns / 1e6);
  return `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}

export function moment(ns) {
  if (isMissing(ns)) return NOTHING;
  const time = new Date(ns / 1e6);
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${clock(ns)}`;
}

// A value of an array: up to six digits, whole ones as they are.
export function value(it) {
  if (Array.isArray(it)) return `(${it.map(value).join(", ")})`;
  if (typeof it !== "number") return String(it);
  return Number.isInteger(it) ? String(it) : String(Number(it.toPrecision(6)));
}

export const nameOf = (stream) => stream.name ?? `stream ${stream.stream_id}`;
