// SPDX-License-Identifier: Apache-2.0
// How the page looks at an array, and the controls for it; the fields are those of src/tensorpool/looks.
import { html } from "./vendor.js";
import { value } from "./format.js";

const COLORMAPS = ["gray", "viridis", "magma", "cividis", "turbo"];
const SCALES = {
  auto: "automatic",
  full: "whole range",
  minmax: "min to max",
  percentile: "1 to 99 %",
  fixed: "from … to",
};

export const DEFAULT_LOOK = {
  width: 960,
  height: 960,
  colormap: "gray",
  scale: "auto",
  index: [],
  region: null,
  lossless: false,
};

// One channel, as far as the header says; a colour map means nothing for more.
const isGrey = (header) => {
  if (!header) return true;
  const kept = header.shape.length - (header.axes?.length ?? 0);
  return kept < 3;
};

export const nextColormap = (look) => ({
  ...look,
  colormap: COLORMAPS[(COLORMAPS.indexOf(look.colormap) + 1) % COLORMAPS.length],
});

function Slices({ look, axes, onLook }) {
  const indexOf = (axis) => look.index[axis] ?? Math.floor(axes[axis] / 2);
  const change = (axis, index) =>
    onLook({ ...look, index: axes.map((_, other) => (other === axis ? index : indexOf(other))) });
  return axes.map(
    (size, axis) => html`<label class="slice" key=${axis}>
    <span>axis ${axis}</span>
    <input type="range" min="0" max=${size - 1} value=${indexOf(axis)} onInput=${(event) => change(axis, Number(event.target.value))} />
    <output>${indexOf(axis)} of ${size}</output>
  </label>`,
  );
}

export function LookControls({ look, header, onLook }) {
  const set = (fields) => onLook({ ...look, ...fields });
  const number = (text) => (text.trim() === "" || Number.isNaN(Number(text)) ? null : Number(text));
  const rescale = (scale) =>
    set(
      scale === "fixed"
        ? { scale, low: header?.low ?? 0, high: header?.high ?? 255 }
        : { scale, low: undefined, high: undefined },
    );
  // An incomplete pair is not sent: the server would refuse it.
  const bound = (name, text) => number(text) !== null && set({ [name]: number(text) });
  return html`<div class="controls">
    <label>colours
      <select value=${look.colormap} disabled=${!isGrey(header)} onChange=${(event) => set({ colormap: event.target.value })}>
        ${COLORMAPS.map((it) => html`<option key=${it} value=${it}>${it}</option>`)}
      </select>
    </label>
    <label>scale
      <select value=${look.scale} onChange=${(event) => rescale(event.target.value)}>
        ${Object.entries(SCALES).map(([it, word]) => html`<option key=${it} value=${it}>${word}</option>`)}
      </select>
    </label>
    ${
      look.scale === "fixed"
        ? html`<label>black <input type="number" step="any" value=${look.low} onChange=${(event) => bound("low", event.target.value)} />
          </label>
          <label>white <input type="number" step="any" value=${look.high} onChange=${(event) => bound("high", event.target.value)} />
          </label>`
        : html`<span class="range" title="the values that are black and white">
          <span>${header && header.low != null ? `${value(header.low)} … ${value(header.high)}` : ""}</span></span>`
    }
    <label class="check" title="PNG of every n-th pixel instead of JPEG of averages">
      <input type="checkbox" checked=${look.lossless} onChange=${(event) => set({ lossless: event.target.checked })} /> lossless</label>
    ${header?.axes?.length ? html`<${Slices} look=${look} axes=${header.axes} onLook=${onLook} />` : null}
  </div>`;
}
