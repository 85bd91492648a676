// SPDX-License-Identifier: Apache-2.0
// The state of a stream, consumer or service: a sign, a colour and the word, so that no colour alone says anything.
import { html } from "./vendor.js";

// The worst first, as src/tensorpool/supervisor/snapshot.py has them.
export const STREAM_STATES = ["stale", "no producer", "idle", "live"];
export const CONSUMER_STATES = ["expired", "stale", "dropping", "lagging", "redirected", "ok"];

const SIGNS = {
  live: ["●", "good"],
  ok: ["●", "good"],
  running: ["●", "good"],
  OK: ["●", "good"],
  idle: ["○", "quiet"],
  paused: ["‖", "quiet"],
  draining: ["↓", "quiet"],
  "no producer": ["–", "quiet"],
  redirected: ["↷", "quiet"],
  lagging: ["▲", "warn"],
  dropping: ["▼", "warn"],
  WARN: ["▲", "warn"],
  stale: ["✕", "bad"],
  expired: ["✕", "bad"],
  FAIL: ["✕", "bad"],
};
const OTHER = ["◌", "quiet"];

export const toneOf = (state) => (SIGNS[state] ?? OTHER)[1];

export function Sign({ state, word }) {
  const [sign, tone] = SIGNS[state] ?? OTHER;
  return html`<span class="sign ${tone}"><i aria-hidden="true">${sign}</i><span>${word ?? state}</span></span>`;
}

export const worst = (states, order) => order.find((state) => states.includes(state));
