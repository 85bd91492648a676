// SPDX-License-Identifier: Apache-2.0
// The view of one stream.
import { html, useMemo } from "./vendor.js";
import { usePolled } from "./api.js";
import { Consumers } from "./consumers.js";
import { age, epoch, frame, integer, mib, nameOf, NOTHING, number, size } from "./format.js";
import { Histogram, LivePicture, Look, Profile, Toolbar, usePreview } from "./live_view.js";
import { Marked } from "./marked.js";
import { Plot } from "./plots.js";
import { Ring } from "./ring.js";
import { hrefOf } from "./route.js";
import { Sign } from "./signs.js";
import { consumersOf, history, isFresh, state, streams } from "./state.js";

const DETAIL_MS = 1000;
const NO_DATA = [
  [0, 1],
  [null, null],
];

function Facts({ stream }) {
  const facts = [
    ["frame", frame(stream), stream.frame_bytes == null ? "" : size(stream.frame_bytes)],
    ["rate", `${number(stream.rate_hz)} Hz`, `${mib(stream.bytes_per_s)} MiB/s`],
    ["newest", age(stream.frame_age_ns), stream.seq == null ? "" : `seq ${stream.seq}`],
    [
      "ring",
      stream.ring_s == null ? NOTHING : `${number(stream.ring_s)} s`,
      stream.nslots == null ? "" : `${stream.nslots} slots`,
    ],
    ["epoch", integer(stream.epoch), stream.epoch_changes ? `changed ${stream.epoch_changes} times` : ""],
    ["producer", integer(stream.producer_id), ""],
    ["announced", stream.announced_age_ns == null ? NOTHING : `${age(stream.announced_age_ns)} ago`, ""],
  ];
  return html`<section class="panel facts"><h2>Stream <small>${stream.stream_id}</small></h2>
    <dl>${facts.map(
      ([name, text, more]) => html`<div key=${name}><dt>${name}</dt>
      <dd>
      <${Marked} of=${name === "epoch" || name === "producer" || name === "frame" ? text : name}>${text}<//> <small>${more}</small>
      </dd></div>`,
    )}</dl>
    ${stream.layout_flaw && html`<p class="trouble">No client can map it: ${stream.layout_flaw}</p>`}
    ${stream.region_fault && stream.state !== "stale" && html`<p class="trouble">Its memory cannot be read: ${stream.region_fault}</p>`}
    ${stream.summary && html`<p class="summary">${stream.summary}</p>`}
  </section>`;
}

function Plots({ id, view }) {
  const points = history.value.get(id);
  const rates = useMemo(() => (points?.t.length ? [[...points.t], [...points.rate]] : NO_DATA), [history.value]);
  const bytes = useMemo(
    () => (points?.t.length ? [[...points.t], points.bytes.map((it) => (it === null ? null : it / 2 ** 20))] : NO_DATA),
    [history.value],
  );
  const found = view.preview.latencies.value;
  const latencies = useMemo(
    () => (found.length ? [found.map(([t]) => t), found.map(([, ms]) => ms)] : NO_DATA),
    [found],
  );
  const median = found.length
    ? found.map(([, ms]) => ms).sort((one, other) => one - other)[Math.floor(found.length / 2)]
    : null;
  return html`<div class="three">
    <section class="panel"><h2>Rate <small>Hz, ten minutes</small></h2>
    <${Plot} data=${rates} isTime=${true} hasZero=${true} label="frames a second" /></section>
    <section class="panel"><h2>Throughput <small>MiB/s, ten minutes</small></h2>
    <${Plot} data=${bytes} isTime=${true} hasZero=${true} label="MiB a second" /></section>
    <section class="panel">
    <h2>Latency <small>${median === null ? "ms, from publish to this page's server" : `ms, median ${number(median)}`}</small>
    </h2>
      <${Plot} data=${latencies} isTime=${true} hasZero=${true} label="milliseconds from publish to the console" /></section>
  </div>`;
}

function Process({ holder }) {
  if (holder?.pid == null) return html`<span class="none">${holder?.aeron_client || "not declared"}</span>`;
  const where = holder.place ? ` on ${holder.host} (${holder.place})` : "";
  const known = holder.source === "seen" ? "" : " declared";
  return html`<span title=${holder.command}>${holder.user} ${holder.pid} ${holder.program}${where}<small>${known}</small></span>`;
}

function Leases({ leases }) {
  if (!leases.length) return html`<p class="none">No lease.</p>`;
  return html`<div class="scroll"><table class="grid leases">
    <thead><tr><th class="id">lease</th><th>role</th><th>process</th><th class="num">client</th><th class="num">held</th>
    <th class="num">keepalive</th></tr></thead>
    <tbody>${leases.map(
      (
        it,
      ) => html`<tr key=${it.lease_id}><td class="id" title=${String(it.lease_id)}>${epoch(it.lease_id)}</td>
        <td>${it.role.toLowerCase()}</td><td class="process"><${Process} holder=${it.holder} /></td>
      <td class="num">${it.client_id}</td><td class="num">${age(it.held_ns)}</td><td class="num">${age(it.age_ns)}</td>
      </tr>`,
    )}</tbody>
  </table></div>`;
}

function Metadata({ metadata }) {
  const entries = Object.entries(metadata ?? {});
  if (!entries.length) return html`<p class="none">No metadata.</p>`;
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return html`<dl class="metadata">${entries.map(([key, value]) => html`<div key=${key}><dt>${key}</dt>
    <dd>${text(value)}</dd></div>`)}</dl>`;
}

export function Stream({ id }) {
  const stream = streams.value.find((it) => it.stream_id === id);
  const [detail, failure] = usePolled(`/api/streams/${id}`, DETAIL_MS, isFresh.value && stream !== undefined);
  const view = usePreview(id);
  if (!stream) {
    return html`<p class="empty">${state.value === null ? "Waiting for the console…" : `There is no stream ${id}. It may have ended.`}
      <br /><a href=${hrefOf("streams")}>All streams</a></p>`;
  }
  const consumers = consumersOf.value.get(id) ?? [];
  const isOver = stream.state === "stale" || stream.state === "no producer";
  return html`
    <div class="title">
      <a href=${hrefOf("streams")} aria-label="All streams" class="back">←</a>
      <h1>${nameOf(stream)}</h1>
      <${Marked} of=${stream.state}><${Sign} state=${stream.state} /><//>
      <span class="tags">${stream.tags.map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}</span>
    </div>
    <div class="stage">
      <section class="panel flush live">
        <${Toolbar} view=${view} id=${id} />
        <${LivePicture} view=${view} name=${nameOf(stream)} isOver=${isOver} />
        <${Look} view=${view} />
      </section>
      <div class="side">
        <${Facts} stream=${stream} />
        <${Histogram} view=${view} />
        <${Profile} view=${view} />
      </div>
    </div>
    <${Plots} id=${id} view=${view} />
    <div class="two">
      <section class="panel"><h2>Consumers <small>${consumers.length}</small></h2>
      <${Consumers} consumers=${consumers} /></section>
      <section class="panel"><h2>Ring <small>${detail?.slots ? `${detail.slots.nslots} slots` : failure}</small></h2>
        ${detail?.slots ? html`<${Ring} slots=${detail.slots} />` : html`<p class="none">Not read.</p>`}</section>
      <section class="panel"><h2>Leases</h2>
      <${Leases} leases=${(state.value?.leases ?? []).filter((it) => it.stream_id === id)} /></section>
      <section class="panel"><h2>Metadata</h2><${Metadata} metadata=${detail?.metadata} /></section>
    </div>`;
}
