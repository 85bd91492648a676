// SPDX-License-Identifier: Apache-2.0
// Plots by uPlot, in the colours of the page.
import { html, uPlot, useEffect, useRef } from "./vendor.js";
import { clock, value as shownValue } from "./format.js";

const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);
let colours = new Map();

// The value of a colour of the page, as a canvas takes it.
export function colour(name) {
  let found = colours.get(name);
  if (!found) {
    probe.style.color = `var(--${name})`;
    found = getComputedStyle(probe).color;
    colours.set(name, found);
  }
  return found;
}

// Calls back when the page changes from light to dark or back.
export function onColours(act) {
  const change = () => {
    colours = new Map();
    act();
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("tensorpool-theme", change);
  system.addEventListener("change", change);
  return () => {
    removeEventListener("tensorpool-theme", change);
    system.removeEventListener("change", change);
  };
}

const FONT = "11px Inter, system-ui, sans-serif";

function optionsOf({ kind, isTime, height, hasZero }, width, onHover) {
  const axis = {
    stroke: () => colour("dim"),
    font: FONT,
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false },
  };
  const line = { stroke: () => colour("accent"), width: 1.5, points: { show: false }, spanGaps: false };
  const series = {
    line: [line],
    band: [line, { ...line }],
    steps: [{ ...line, paths: uPlot.paths.stepped({ align: 1 }), fill: () => colour("accent-soft") }],
  }[kind];
  return {
    width,
    height,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 } },
    scales: {
      x: { time: isTime },
      y: {
        range: (_, low, high) => (hasZero ? [0, (high || 1) * 1.1] : low === high ? [low - 1, high + 1] : [low, high]),
      },
    },
    axes: [
      {
        ...axis,
        size: 24,
        space: 84,
        values: isTime
          ? (_, ticks) =>
              ticks.map((s) => clock(s * 1e9).slice(0, 5 + 3 * (kind === "line" && ticks[1] - ticks[0] < 60)))
          : undefined,
      },
      { ...axis, size: 46, space: 26, values: (_, ticks) => ticks.map(shownValue) },
    ],
    series: [{}, ...series],
    bands: kind === "band" ? [{ series: [2, 1], fill: () => colour("accent-soft") }] : [],
    hooks: { setCursor: [(plot) => onHover?.(plot.cursor.idx)] },
  };
}

// `data`: [xs, ys, …]. `kind`: line, steps, or band (two columns: least and most).
export function Plot({ data, kind = "line", isTime = false, hasZero = false, height = 120, label, onHover }) {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const width = Math.max(40, box.current.clientWidth);
    plot.current = new uPlot(optionsOf({ kind, isTime, hasZero, height }, width, onHover), data, box.current);
    const observer = new ResizeObserver(([entry]) =>
      plot.current.setSize({ width: Math.max(40, entry.contentRect.width), height }),
    );
    observer.observe(box.current);
    const stop = onColours(() => plot.current.redraw(false));
    return () => {
      stop();
      observer.disconnect();
      plot.current.destroy();
    };
  }, [kind, isTime, hasZero, height]);
  useEffect(() => {
    plot.current.setData(data);
  }, [data]);
  return html`<div class="plot plot-${height}" ref=${box} role="img" aria-label=${label}></div>`;
}
