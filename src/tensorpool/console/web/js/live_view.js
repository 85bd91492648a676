// SPDX-License-Identifier: Apache-2.0
// The live picture of a stream with everything that looks at it: controls, a pixel's value, histogram, profile.
import { html, signal, useEffect, useMemo } from "./vendor.js";
import { value } from "./format.js";
import { useKeys } from "./keys.js";
import { DEFAULT_LOOK, LookControls, nextColormap } from "./look.js";
import { Plot } from "./plots.js";
import { Preview } from "./preview.js";
import { Placement, Viewport } from "./viewport.js";

const PAN = 60; // pixels a key
const MOST_SIDE = 4096; // of a picture

// A preview with its look, closed with the component that uses it.
export function usePreview(id) {
  const view = useMemo(() => {
    const look = signal(DEFAULT_LOOK);
    return {
      preview: new Preview(id, DEFAULT_LOOK),
      placement: new Placement(),
      look,
      point: signal(null),
      line: signal(null),
      isDrawing: signal(false),
      hasHistogram: signal(true),
    };
  }, [id]);
  useEffect(() => {
    view.preview.setHistogram(view.hasHistogram.value);
    return () => view.preview.close();
  }, [view]);
  return view;
}

export function setLook({ preview, look }, next) {
  if (JSON.stringify(next) === JSON.stringify(look.value)) return;
  look.value = next;
  preview.setLook(next);
}

function Lines({ preview, height }) {
  const [pairs, { step }] = [preview.line.value, preview.header.value];
  const data = useMemo(() => {
    const count = pairs.length / 2;
    const column = (of) => Array.from({ length: count }, (_, index) => of(index));
    return [
      column((index) => index * step),
      column((index) => pairs[2 * index]),
      column((index) => pairs[2 * index + 1]),
    ];
  }, [pairs]);
  return html`<div class="lines"><${Plot} data=${data} kind="band" height=${height} label="values of the array" /></div>`;
}

// What is under the pointer, and which frame this is; its height never changes.
function Readout({ view }) {
  const header = view.preview.header.value;
  const pixel = view.preview.pixel.value;
  const point = view.point.value;
  const isSame = point && pixel && pixel.x === point[0] && pixel.y === point[1];
  return html`<p class="readout">
    <span class="pixel">${point ? html`<span>x ${point[0]} y ${point[1]}</span> <b>${isSame ? value(pixel.value) : "…"}</b>` : ""}</span>
    <span>${header ? `seq ${header.seq}` : ""}</span>
    <span title="how old the frame was when it was taken for this picture">${header?.age_ms != null ? `${Math.round(header.age_ms)} ms old` : ""}</span>
  </p>`;
}

export function LivePicture({ view, name, isOver, isSmall = false }) {
  const { preview, placement, look, line } = view;
  const header = preview.header.value;
  const point = view.point.value;
  useEffect(() => {
    if (point && header) preview.ask({ type: "pixel", x: point[0], y: point[1] });
  }, [point?.[0], point?.[1], header?.number]);
  useEffect(() => {
    if (line.value && header) {
      const [x0, y0, x1, y1] = line.value;
      preview.ask({ type: "profile", x0, y0, x1, y1 });
    }
  }, [line.value, header?.number]);
  const text = preview.error.value || preview.status.value;
  return html`<div class="picture ${isOver ? "over" : ""} ${isSmall ? "small" : ""}">
    <${Viewport} source=${preview} placement=${placement} label=${`newest frame of ${name}`} line=${line.value}
      isDrawing=${view.isDrawing.value}
      onWanted=${(wanted) => setLook(view, { ...look.value, ...wanted })}
      onPoint=${(found) => (view.point.value = found)}
      onLine=${(found) => {
        line.value = found;
        view.isDrawing.value = false;
      }}>
      ${preview.line.value && header && html`<${Lines} preview=${preview} height=${Math.floor(placement.box[1])} />`}
      ${text && html`<p class="status ${header ? "strip" : ""}" role="status">${text}</p>`}
      ${preview.isPaused.value && html`<span class="paused">‖ paused</span>`}
    <//>
    <${Readout} view=${view} />
  </div>`;
}

export function Toolbar({ view, id }) {
  const { preview, placement, line } = view;
  const isPaused = preview.isPaused.value;
  const header = preview.header.value;
  // The whole frame, as large as it is; of a paused page the one that it shows.
  const save = (kind) => {
    const { colormap, scale, low, high, index } = view.look.value;
    const look = JSON.stringify({ colormap, scale, low, high, index, width: MOST_SIDE, height: MOST_SIDE });
    const query = { ...(isPaused && header ? { seq: header.seq } : {}), ...(kind === "png" ? { look } : {}) };
    return `/api/streams/${id}/frame.${kind}?${new URLSearchParams(query)}`;
  };
  const toggleHistogram = () => {
    view.hasHistogram.value = !view.hasHistogram.value;
    preview.setHistogram(view.hasHistogram.value);
  };
  const toggleProfile = () => {
    if (line.value) line.value = null;
    else view.isDrawing.value = !view.isDrawing.value;
  };
  useKeys({
    " ": () => preview.setPaused(!preview.isPaused.value),
    ".": () => preview.step(),
    "+": () => placement.zoom(1.4),
    "=": () => placement.zoom(1.4),
    "-": () => placement.zoom(1 / 1.4),
    0: () => placement.whole(),
    ArrowLeft: () => placement.move(PAN, 0),
    ArrowRight: () => placement.move(-PAN, 0),
    ArrowUp: () => placement.move(0, PAN),
    ArrowDown: () => placement.move(0, -PAN),
    c: () => setLook(view, nextColormap(view.look.value)),
    h: toggleHistogram,
    p: toggleProfile,
  });
  const pressed = (isOn) => (isOn ? "true" : "false");
  return html`<div class="toolbar" role="toolbar" aria-label="Preview">
    <button class="wide" onClick=${() => preview.setPaused(!isPaused)} aria-pressed=${pressed(isPaused)} title="Space">
      ${isPaused ? "▶ Go on" : "‖ Pause"}</button>
    <button onClick=${() => preview.step()} title="the next frame (.)">Step</button>
    <span class="group">
      <button onClick=${() => placement.zoom(1 / 1.4)} aria-label="Zoom out" title="zoom out (−)">−</button>
      <button onClick=${() => placement.whole()} title="the whole frame (0)">Fit</button>
      <button onClick=${() => placement.zoom(1.4)} aria-label="Zoom in" title="zoom in (+)">+</button>
    </span>
    <button onClick=${toggleProfile} aria-pressed=${pressed(view.isDrawing.value || line.value !== null)} title="draw a line (p, or Shift)">Profile</button>
    <button onClick=${toggleHistogram} aria-pressed=${pressed(view.hasHistogram.value)} title="h">Histogram</button>
    <span class="space"></span>
    <a class="button" href=${save("png")} download title="the whole frame as a picture">PNG</a>
    <a class="button" href=${save("npy")} download title="the whole frame as an array">NPY</a>
  </div>`;
}

export function Histogram({ view }) {
  const header = view.preview.header.value;
  const found = view.hasHistogram.value ? header?.histogram : null;
  const data = useMemo(() => {
    if (!found)
      return [
        [0, 1],
        [0, 0],
      ];
    const width = (found.high - found.low) / found.counts.length || 1;
    return [found.counts.map((_, index) => found.low + index * width), found.counts];
  }, [header?.number, view.hasHistogram.value]);
  return html`<section class="panel">
    <h2>Histogram <small>${found ? `${value(found.low)} … ${value(found.high)}` : view.hasHistogram.value ? "" : "off"}</small>
    </h2>
    <${Plot} data=${data} kind="steps" hasZero=${true} height=${120} label="histogram of the visible part" /></section>`;
}

export function Profile({ view }) {
  const line = view.line.value;
  const found = view.preview.profile.value;
  const data = useMemo(
    () => [
      found ? found.map((_, index) => index) : [0, 1],
      found
        ? found.map((it) => (Array.isArray(it) ? it.reduce((sum, one) => sum + one, 0) / it.length : it))
        : [null, null],
    ],
    [found],
  );
  return html`<section class="panel">
    <h2>Line profile <small>${line ? `(${line[0]}, ${line[1]}) to (${line[2]}, ${line[3]})` : "draw a line with Shift, or press p"}</small>
    </h2>
    ${line ? html`<${Plot} data=${data} kind="line" height=${120} label="values along the line" />` : html`<div class="plot-120">
      </div>`}</section>`;
}

export const Look = ({ view }) =>
  html`<${LookControls} look=${view.look.value} header=${view.preview.header.value} onLook=${(next) => setLook(view, next)} />`;
