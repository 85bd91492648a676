// SPDX-License-Identifier: Apache-2.0
// The consumers of a stream: who reads it, how far behind, and what was lost, by reason.
import { html } from "./vendor.js";
import { age, integer, NOTHING, number } from "./format.js";
import { Marked } from "./marked.js";
import { CONSUMER_STATES, Sign, toneOf } from "./signs.js";

const modeOf = (consumer) =>
  consumer.mode === "RATE_LIMITED"
    ? `limited${consumer.max_rate_hz ? ` ${consumer.max_rate_hz} Hz` : ""}`
    : (consumer.mode ?? NOTHING).toLowerCase();

const worstFirst = (one, other) =>
  CONSUMER_STATES.indexOf(one.state) - CONSUMER_STATES.indexOf(other.state) || one.consumer_id - other.consumer_id;

export function Consumers({ consumers }) {
  if (!consumers.length) return html`<p class="none">No consumer.</p>`;
  return html`<div class="scroll"><table class="grid consumers">
    <thead><tr>
      <th class="id">consumer</th><th class="state">state</th><th class="mode">mode</th><th class="num hz">Hz</th>
      <th class="num">lag</th><th class="num">gap</th><th class="num">late</th><th class="num rate">lost/s</th>
      <th class="num reported">reported</th>
    </tr></thead>
    <tbody>${[...consumers].sort(worstFirst).map(
      (it) => html`<tr key=${it.consumer_id} class=${toneOf(it.state) === "bad" ? "faint" : ""}>
      <td class="id">${it.consumer_id}${it.is_console && html` <small title="this console's own, for its preview">console</small>`}</td>
      <td class="state"><${Marked} of=${it.state}><${Sign} state=${it.state} /><//></td>
      <td class="mode" title=${it.fallback_uri ?? ""}>${modeOf(it)}</td>
      <td class="num hz">${number(it.rate_hz)}</td>
      <td class="num">${integer(it.lag)}</td>
      <td class="num"><${Marked} of=${it.drops_gap}>${it.drops_gap}<//></td>
      <td class="num"><${Marked} of=${it.drops_late}>${it.drops_late}<//></td>
      <td class="num rate">${number(it.drops_per_s)}</td>
      <td class="num reported">${age(it.age_ns)}</td>
    </tr>`,
    )}</tbody>
  </table></div>`;
}
