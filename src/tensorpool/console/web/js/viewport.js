// SPDX-License-Identifier: Apache-2.0
// A picture of an array that is zoomed and moved: by wheel, pointer, two fingers and keys.
//
// The canvas has exactly the pixels that were sent; it is placed and stretched by its style. A zoomed part is asked for
// in its own resolution; until it comes, the picture of before is stretched.
import { html, useEffect, useLayoutEffect, useRef } from "./vendor.js";

const MOST_SCALE = 64; // pixels of the screen for one of the array
const ASK_MS = 160; // after the last change
const ROUND = 160; // sizes are asked for in steps, so that browsers of similar size share one picture
const MOST_SIDE = 1920;

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export class Placement {
  // `view`: null for the whole array, else {x, y, scale}: the array's pixel in the middle, and pixels of the screen for one.
  constructor() {
    this.view = null;
    this.size = [1, 1]; // of the array
    this.box = [1, 1]; // of the element, in pixels of the page
    this.picture = null; // {region, step, width, height}
    this.onChange = null;
  }

  get fit() {
    return Math.min(this.box[0] / this.size[0], this.box[1] / this.size[1]);
  }

  get scale() {
    return this.view?.scale ?? this.fit;
  }

  get origin() {
    const [x, y] = this.view ? [this.view.x, this.view.y] : [this.size[0] / 2, this.size[1] / 2];
    return [this.box[0] / 2 - x * this.scale, this.box[1] / 2 - y * this.scale];
  }

  toArray(x, y) {
    const [left, top] = this.origin;
    return [(x - left) / this.scale, (y - top) / this.scale];
  }

  zoom(factor, x = this.box[0] / 2, y = this.box[1] / 2) {
    const scale = clamp(this.scale * factor, this.fit, MOST_SCALE);
    if (scale <= this.fit * 1.001) this.view = null;
    else {
      const [column, row] = this.toArray(x, y);
      this.view = { scale, x: column - (x - this.box[0] / 2) / scale, y: row - (y - this.box[1] / 2) / scale };
      this.bound();
    }
    this.onChange?.();
  }

  move(dx, dy) {
    if (!this.view) return;
    this.view = { ...this.view, x: this.view.x - dx / this.scale, y: this.view.y - dy / this.scale };
    this.bound();
    this.onChange?.();
  }

  whole() {
    this.view = null;
    this.onChange?.();
  }

  // The middle of the view stays inside the array.
  bound() {
    this.view.x = clamp(this.view.x, 0, this.size[0]);
    this.view.y = clamp(this.view.y, 0, this.size[1]);
  }

  // The part of the array that is visible, [x, y, width, height], or null for all of it.
  get region() {
    if (!this.view) return null;
    const [x0, y0] = this.toArray(0, 0);
    const [x1, y1] = this.toArray(...this.box);
    const [left, top] = [clamp(Math.floor(x0), 0, this.size[0] - 1), clamp(Math.floor(y0), 0, this.size[1] - 1)];
    const [right, bottom] = [clamp(Math.ceil(x1), left + 1, this.size[0]), clamp(Math.ceil(y1), top + 1, this.size[1])];
    return [left, top, right - left, bottom - top];
  }

  // What to ask for in a look.
  get wanted() {
    const side = (length) => clamp(Math.ceil((length * devicePixelRatio) / ROUND) * ROUND, ROUND, MOST_SIDE);
    return { width: side(this.box[0]), height: side(this.box[1]), region: this.region };
  }
}

function place(canvas, placement) {
  const { picture } = placement;
  if (!picture) return;
  const [left, top] = placement.origin;
  const { scale } = placement;
  const [x, y] = picture.region ?? [0, 0];
  const pixels = picture.step * scale;
  Object.assign(canvas.style, {
    left: `${left + x * scale}px`,
    top: `${top + y * scale}px`,
    width: `${picture.width * pixels}px`,
    height: `${picture.height * pixels}px`,
    imageRendering: pixels > 1.5 ? "pixelated" : "auto",
  });
}

// `source.onPicture` is set here. `onWanted` gets what to ask for; `onPoint` the array's pixel under the pointer, or null;
// `onLine` the ends of a line that was drawn with Shift, or with `isDrawing`.
export function Viewport({ source, placement, onWanted, onPoint, onLine, line, isDrawing, label, children }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const pointers = useRef(new Map());
  const start = useRef(null);
  const timer = useRef(0);
  const handlers = useRef({});
  handlers.current = { onWanted };

  useLayoutEffect(() => {
    const wanted = () => handlers.current.onWanted?.(placement.wanted);
    placement.onChange = () => {
      place(canvas.current, placement);
      drawOverlay();
      clearTimeout(timer.current);
      timer.current = setTimeout(wanted, ASK_MS);
    };
    const observer = new ResizeObserver(([entry]) => {
      placement.box = [Math.max(1, entry.contentRect.width), Math.max(1, entry.contentRect.height)];
      placement.onChange();
    });
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      clearTimeout(timer.current);
      placement.onChange = null;
    };
  }, [placement]);

  useLayoutEffect(() => {
    source.onPicture = (bitmap, header) => {
      const element = canvas.current;
      if (element.width !== bitmap.width || element.height !== bitmap.height) {
        element.width = bitmap.width;
        element.height = bitmap.height;
      }
      element.getContext("2d").drawImage(bitmap, 0, 0);
      if (placement.size[0] !== header.size[0] || placement.size[1] !== header.size[1]) {
        placement.size = header.size;
        placement.view = null;
      }
      placement.picture = { region: header.region, step: header.step, width: bitmap.width, height: bitmap.height };
      place(element, placement);
      Object.assign(element.dataset, { seq: header.seq, media: header.media, region: header.region ?? "" });
    };
    return () => (source.onPicture = null);
  }, [source, placement]);

  // A line's ends are of the array; it stays where it is when the picture moves.
  const overlay = useRef(null);
  const drawOverlay = () => {
    const element = overlay.current;
    const ends = start.current?.line ?? line;
    if (!element) return;
    element.style.display = ends ? "" : "none";
    if (!ends) return;
    const [left, top] = placement.origin;
    const at = (value, offset) => (value + 0.5) * placement.scale + offset;
    const [x0, y0, x1, y1] = ends;
    for (const [name, value] of [
      ["x1", at(x0, left)],
      ["y1", at(y0, top)],
      ["x2", at(x1, left)],
      ["y2", at(y1, top)],
    ]) {
      for (const child of element.children) child.setAttribute(name, value);
    }
  };
  useEffect(drawOverlay);

  const positionOf = (event) => {
    const bounds = box.current.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  };
  const pixelOf = (x, y) => {
    const [column, row] = placement.toArray(x, y).map(Math.floor);
    const isInside = column >= 0 && row >= 0 && column < placement.size[0] && row < placement.size[1];
    return isInside ? [column, row] : null;
  };
  const inside = (x, y) => {
    const [column, row] = placement.toArray(x, y).map(Math.floor);
    return [clamp(column, 0, placement.size[0] - 1), clamp(row, 0, placement.size[1] - 1)];
  };

  const onPointerDown = (event) => {
    if (event.button !== 0) return;
    box.current.setPointerCapture(event.pointerId);
    const [x, y] = positionOf(event);
    pointers.current.set(event.pointerId, [x, y]);
    if ((event.shiftKey || isDrawing) && onLine) start.current = { line: [...inside(x, y), ...inside(x, y)] };
  };
  const onPointerMove = (event) => {
    const [x, y] = positionOf(event);
    onPoint?.(pixelOf(x, y));
    const before = pointers.current.get(event.pointerId);
    if (!before) return;
    if (start.current?.line) {
      start.current.line.splice(2, 2, ...inside(x, y));
      drawOverlay();
    } else if (pointers.current.size === 1) placement.move(x - before[0], y - before[1]);
    else {
      const other = [...pointers.current].find(([id]) => id !== event.pointerId)[1];
      const distance = (one) => Math.hypot(one[0] - other[0], one[1] - other[1]) || 1;
      placement.zoom(distance([x, y]) / distance(before), (x + other[0]) / 2, (y + other[1]) / 2);
    }
    pointers.current.set(event.pointerId, [x, y]);
  };
  const onPointerUp = (event) => {
    pointers.current.delete(event.pointerId);
    const drawn = start.current?.line;
    start.current = null;
    if (drawn) onLine(drawn[0] === drawn[2] && drawn[1] === drawn[3] ? null : drawn);
  };
  useEffect(() => {
    const onWheel = (event) => {
      event.preventDefault();
      placement.zoom(Math.exp(-event.deltaY / 300), ...positionOf(event));
    };
    box.current.addEventListener("wheel", onWheel, { passive: false });
    return () => box.current?.removeEventListener("wheel", onWheel);
  }, [placement]);

  return html`<div class="viewport ${isDrawing ? "drawing" : ""}" ref=${box} role="img" aria-label=${label}
    onPointerDown=${onPointerDown} onPointerMove=${onPointerMove} onPointerUp=${onPointerUp} onPointerCancel=${onPointerUp}
    onPointerLeave=${() => onPoint?.(null)} onDblClick=${() => placement.whole()}>
    <canvas ref=${canvas} width="1" height="1"></canvas>
    <svg class="overlay" ref=${overlay} style="display:none" aria-hidden="true"><line class="under" />
    <line class="over" /></svg>
    ${children}
  </div>`;
}
