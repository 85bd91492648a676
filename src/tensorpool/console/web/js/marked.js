// SPDX-License-Identifier: Apache-2.0
// Marks what changed: a tint that fades within seconds.
import { html, useRef } from "./vendor.js";

export function Marked({ of, children }) {
  const before = useRef(of);
  const changes = useRef(0);
  if (before.current !== of) {
    before.current = of;
    changes.current += 1;
  }
  // A new key makes a new element, whose animation begins again.
  return html`<span key=${changes.current} class=${changes.current ? "changed" : ""}>${children}</span>`;
}
