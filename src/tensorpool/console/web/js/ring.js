// SPDX-License-Identifier: Apache-2.0
// The slots of a ring as a picture: committed, in progress, stale or empty; the newest has a frame around it.
import { html, useEffect, useRef } from "./vendor.js";
import { colour, onColours } from "./plots.js";

const GAP = 1;
const SIDES = [18, 14, 10, 8, 6, 4, 3]; // of a cell; the largest with which the ring fits
const HEIGHT = 132;
const NAMES = { c: "committed", w: "in progress", s: "stale or empty" };
const COLOURS = { c: "accent", w: "orange", s: "cell" };

function draw(canvas, { states, newest, nslots }) {
  const width = Math.max(1, canvas.clientWidth);
  const side =
    SIDES.find((it) => Math.ceil(states.length / Math.floor(width / (it + GAP))) * (it + GAP) <= HEIGHT) ?? 2;
  const columns = Math.max(1, Math.floor(width / (side + GAP)));
  const ratio = devicePixelRatio;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const place = (index) => [(index % columns) * (side + GAP), Math.floor(index / columns) * (side + GAP)];
  for (const [letter, name] of Object.entries(COLOURS)) {
    context.fillStyle = colour(name);
    for (let index = 0; index < states.length; index += 1) {
      if (states[index] !== letter) continue;
      const [x, y] = place(index);
      context.fillRect(x, y, side, side);
      if (letter === "w" && side >= 6) context.clearRect(x + side / 3, y + side / 3, side / 3, side / 3); // a hole: no colour alone
    }
  }
  if (newest == null) return;
  const [x, y] = place(Math.floor(((Number(newest) % nslots) * states.length) / nslots));
  context.strokeStyle = colour("text");
  context.lineWidth = 1.5;
  context.strokeRect(x - 0.25, y - 0.25, side + 0.5, side + 0.5);
}

export function Ring({ slots }) {
  const canvas = useRef(null);
  useEffect(() => {
    const again = () => canvas.current && draw(canvas.current, slots);
    again();
    const observer = new ResizeObserver(again);
    observer.observe(canvas.current);
    const stop = onColours(again);
    return () => {
      stop();
      observer.disconnect();
    };
  }, [slots]);
  const counts = Object.keys(NAMES).map((letter) => [letter, slots.states.split(letter).length - 1]);
  const each = slots.nslots / slots.states.length;
  const text = counts.map(([letter, count]) => `${count} ${NAMES[letter]}`).join(", ");
  return html`<div class="ring">
    <canvas ref=${canvas} role="img" aria-label=${`${slots.nslots} slots: ${text}`}></canvas>
    <p class="legend">${counts.map(([letter, count]) => html`<span key=${letter}>
      <i class="cell ${letter}" aria-hidden="true"></i>${count} ${NAMES[letter]}</span>`)}
      ${each > 1 && html`<span>each cell is ${each} slots</span>`}</p>
  </div>`;
}
