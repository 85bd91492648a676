// SPDX-License-Identifier: Apache-2.0
// Ten minutes of a stream in a line of text: its rate, and marks where consumers lost frames.
import { html } from "./vendor.js";
import { number } from "./format.js";

const WIDTH = 120;
const HEIGHT = 22;
const SPAN_S = 600;
const PAUSE_S = 12; // a longer one interrupts the line

// The path of the values against time; a missing value or a pause begins a new piece.
function pathOf(points, toS, most) {
  let path = "";
  let isDown = false;
  points.t.forEach((t, index) => {
    const value = points.rate[index];
    if (value === null || (isDown && t - points.t[index - 1] > PAUSE_S)) isDown = false;
    if (value === null) return;
    const x = WIDTH * (1 - (toS - t) / SPAN_S);
    const y = HEIGHT - 2 - (HEIGHT - 5) * (value / most);
    path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDown = true;
  });
  return path;
}

function lossesOf(points, toS) {
  let path = "";
  for (let index = 0; index < points.t.length; index += 1) {
    if (points.drops[index]) {
      path += `M${(WIDTH * (1 - (toS - points.t[index]) / SPAN_S)).toFixed(1)} ${HEIGHT}v-5`;
    }
  }
  return path;
}

export function Sparkline({ points, toS }) {
  const values = points ? points.rate.filter((value) => value !== null) : [];
  const most = Math.max(1e-9, ...values);
  const title = values.length
    ? `last ten minutes: ${number(Math.min(...values))} to ${number(most)} Hz`
    : "no rate yet";
  return html`<svg class="sparkline" viewBox="0 0 ${WIDTH} ${HEIGHT}" width=${WIDTH} height=${HEIGHT} role="img" aria-label=${title}>
    <title>${title}</title>
    <path class="base" d="M0 ${HEIGHT - 1.5}H${WIDTH}" />
    ${points && html`<path class="line" d=${pathOf(points, toS, most * 1.05)} />`}
    ${points && html`<path class="loss" d=${lossesOf(points, toS)} />`}
  </svg>`;
}
