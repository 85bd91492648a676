// SPDX-License-Identifier: Apache-2.0
// Keys: each view brings its own; letters typed into a field, and keys with Ctrl, Alt or Meta, are left alone.
import { useEffect, useRef } from "./vendor.js";

const layers = []; // the newest last: it is asked first
const TYPED = "input:not([type=checkbox]):not([type=range]), select, textarea";

// What a focused element does with a key itself.
function isTaken(event) {
  const { target, key } = event;
  if (!(target instanceof Element)) return false;
  if (target.matches(TYPED)) return key !== "Escape";
  if (key === " " || key === "Enter") return target.matches("button, a, summary, input");
  return key.startsWith("Arrow") && target.matches("input[type=range]");
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || isTaken(event) || document.querySelector("dialog[open]"))
    return;
  for (const layer of layers.toReversed()) {
    const act = layer.current[event.key];
    if (act) {
      event.preventDefault();
      act(event);
      return;
    }
  }
});

export function useKeys(actions) {
  const layer = useRef(actions);
  layer.current = actions;
  useEffect(() => {
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
}

export const HELP = [
  [
    "Everywhere",
    [
      ["1 2 3", "streams, recordings, services"],
      ["/", "search"],
      ["t", "light, dark, as the system"],
      ["?", "these keys"],
      ["Esc", "leave a field; back to the list"],
    ],
  ],
  [
    "Streams",
    [
      ["j k ↓ ↑", "next and previous stream"],
      ["Enter", "open it"],
      ["e", "show its consumers"],
    ],
  ],
  [
    "A stream",
    [
      ["Space", "pause, go on"],
      [".", "one frame further"],
      ["+ − 0", "zoom in, out, whole frame"],
      ["← → ↑ ↓", "move the zoomed picture"],
      ["c", "next colour map"],
      ["h", "histogram"],
      ["p", "line profile: draw it, or hold Shift"],
    ],
  ],
  [
    "A recording",
    [
      ["Space", "play, stop"],
      ["← →", "one frame back, further"],
      ["Home End", "first and last frame"],
    ],
  ],
];
