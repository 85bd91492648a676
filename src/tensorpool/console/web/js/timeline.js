// SPDX-License-Identifier: Apache-2.0
// A recording over time: how many frames, and where some are missing and why; a marker that is dragged.
import { html, useRef } from "./vendor.js";
import { clock, counted, moment } from "./format.js";

const WIDTH = 1000;
const HEIGHT = 64;
const GAP_HEIGHT = 12; // of the marks of lost frames, below the bars
const MOST_MARKS = 400;
const TICKS = 5;
const FRAMES_A_BAR = 20;

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Each reason has its own colour, and its word stands beside it.
const REASONS = ["OVERWRITTEN", "UNKNOWN_TAIL", "UNSEEN_EPOCHS"];
const markOf = (reason) => {
  const place = REASONS.indexOf(reason);
  return `mark-${place < 0 ? REASONS.length : place}`;
};
export const wordOf = (reason) => reason.toLowerCase().replaceAll("_", " ");

// The height of each bar, 0 to 1. A bar stands for several frames, so that a short recording is no comb.
function heights(buckets) {
  const frames = buckets.reduce((sum, [, count]) => sum + count, 0);
  const bars = Math.max(1, Math.min(buckets.length, Math.floor(frames / FRAMES_A_BAR)));
  const place = (bar) => Math.floor((bar * buckets.length) / bars);
  const means = Array.from({ length: bars }, (_, bar) => {
    const part = buckets.slice(place(bar), place(bar + 1));
    return part.reduce((sum, [, count]) => sum + count, 0) / Math.max(1, part.length);
  });
  const most = Math.max(1e-9, ...means);
  return means.map((mean) => mean / most);
}

export function Timeline({ timeline, at, onAt }) {
  const element = useRef(null);
  const { from, to, gaps } = timeline;
  const bars = heights(timeline.buckets);
  const span = Math.max(1, to - from);
  const x = (t) => (WIDTH * (t - from)) / span;
  const width = WIDTH / bars.length;
  const path = bars
    .map((share, bar) => {
      const height = (HEIGHT - 4) * share;
      return height
        ? `M${(bar * width).toFixed(2)} ${HEIGHT}v${(-height).toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}z`
        : "";
    })
    .join("");
  const timeOf = (event) => {
    const bounds = element.current.getBoundingClientRect();
    return from + clamp((event.clientX - bounds.left) / bounds.width, 0, 1) * span;
  };
  const drag = (event) => {
    if (event.type === "pointerdown") element.current.setPointerCapture(event.pointerId);
    if (event.buttons & 1) onAt(timeOf(event));
  };
  const ticks = Array.from({ length: TICKS }, (_, index) => from + (span * index) / (TICKS - 1));
  const hidden = gaps.length - MOST_MARKS;
  return html`<div class="timeline">
    <div class="track" ref=${element} role="slider" tabindex="0" aria-label="time of the recording" aria-valuemin=${from} aria-valuemax=${to}
      aria-valuenow=${at ?? from} aria-valuetext=${moment(at ?? from)} onPointerDown=${drag} onPointerMove=${drag}>
      <svg viewBox="0 0 ${WIDTH} ${HEIGHT + GAP_HEIGHT + 2}" preserveAspectRatio="none" aria-hidden="true">
        <path class="bars" d=${path} />
        ${gaps.slice(0, MOST_MARKS).map(
          (it, index) => html`<rect key=${index} class=${markOf(it.reason)} x=${x(it.time)} y=${HEIGHT + 2}
          width="2.5" height=${GAP_HEIGHT}>
          <title>${clock(it.time)} ${counted(it.frames, "frame")} lost: ${wordOf(it.reason)}</title></rect>`,
        )}
      </svg>
      ${at !== null && html`<i class="marker" style=${{ left: `${(100 * (clamp(at, from, to) - from)) / span}%` }}></i>`}
    </div>
    <p class="ticks" aria-hidden="true">${ticks.map((t) => html`<span key=${t}>${clock(t)}</span>`)}</p>
    ${hidden > 0 && html`<p class="none">${counted(hidden, "further gap")} not drawn.</p>`}
  </div>`;
}

export function Losses({ byReason }) {
  const found = Object.entries(byReason).filter(([, count]) => count);
  if (!found.length) return html`<span class="legend"><span>no frame lost</span></span>`;
  return html`<span class="legend">${found.map(
    ([reason, count]) => html`<span key=${reason}>
    <i class="cell ${markOf(reason)}" aria-hidden="true"></i>${count} ${wordOf(reason)}</span>`,
  )}</span>`;
}
