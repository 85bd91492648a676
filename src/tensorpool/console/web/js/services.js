// SPDX-License-Identifier: Apache-2.0
// The view of services and the host: what runs, its commands, memory, findings, and what happened.
import { html, useEffect, useRef, useState } from "./vendor.js";
import { send, usePolled } from "./api.js";
import { ask, notify } from "./dialog.js";
import { age, clock, counted, counts, integer, mib, NOTHING, number, percent, size } from "./format.js";
import { Marked } from "./marked.js";
import { hrefOf } from "./route.js";
import { Sign } from "./signs.js";
import { state } from "./state.js";

const DOCTOR_MS = 60000;
const MEMORY_MS = 5000;
const BRIDGE_MS = 2000;
const EVENTS = 200;
const LEVELS = ["debug", "info", "warning", "error"];
const QUESTIONS = {
  pause: ["Pause", "It stops its work until it is resumed."],
  resume: ["Resume", "It goes on with its work."],
  drain: ["Drain", "It finishes what it is doing and ends. Nothing here can start it again."],
};
const BAD = new Set([
  "stream stale",
  "stream vanished",
  "producer left",
  "consumer stale",
  "consumer expired",
  "consumer lagging",
  "consumer dropping",
  "service stale",
  "service vanished",
  "driver shutdown",
]);

const pathOf = (tag) => `/api/services/${encodeURIComponent(tag)}/commands`;

async function command(service, name, args = {}) {
  try {
    const { result } = await send("POST", pathOf(service.tag), { command: name, arguments: args, confirmed: true });
    notify(`${service.tag}: ${name}: ${typeof result === "string" ? result : JSON.stringify(result)}`);
  } catch (error) {
    notify(`${service.tag}: ${name}: ${error.message}`, true);
  }
}

async function askAndSend(service, name) {
  const [verb, consequence] = QUESTIONS[name];
  if (await ask(`${verb} ${service.tag}?`, consequence, verb)) command(service, name);
}

async function changeLevel(service, level) {
  if (await ask(`Log level of ${service.tag}`, `It will log from level ${level} on.`, "Change"))
    command(service, "log-level", { level });
}

function Commands({ service }) {
  const offered = service.commands ?? [];
  const isPaused = service.state === "paused";
  return html`<span class="commands">
    ${["pause", "resume"]
      .filter((name) => offered.includes(name) && (name === "resume") === isPaused)
      .map(
        (name) => html`<button key=${name}
      disabled=${service.is_stale} onClick=${() => askAndSend(service, name)}>${QUESTIONS[name][0]}</button>`,
      )}
    ${offered.includes("drain") && html`<button disabled=${service.is_stale} onClick=${() => askAndSend(service, "drain")}>Drain</button>`}
    ${
      offered.includes("log-level") &&
      html`<select aria-label=${`log level of ${service.tag}`} disabled=${service.is_stale} value=""
      onChange=${(event) => {
        changeLevel(service, event.target.value);
        event.target.value = "";
      }}>
        <option value="" disabled>Log level</option>${LEVELS.map((it) => html`<option key=${it} value=${it}>${it}</option>`)}</select>`
    }
  </span>`;
}

function ServiceTable() {
  const services = state.value?.services ?? [];
  return html`<section class="panel flush"><h2>Services <small>${services.length}</small></h2>
    ${
      services.length
        ? html`<div class="scroll"><table class="grid services">
      <thead><tr><th class="name">service</th><th class="state">state</th><th class="num pid">pid</th>
      <th class="version">version</th>
        <th class="num">heartbeat</th><th class="actions">commands</th></tr></thead>
      <tbody>${services.map(
        (it) => html`<tr key=${it.tag} class=${it.is_stale ? "faint" : ""} data-service=${it.tag}>
        <th scope="row" class="name">${it.tag.replace(/^service:/, "")}</th>
        <td class="state"><${Marked} of=${`${it.state} ${it.is_stale}`}>
          <${Sign} state=${it.is_stale ? "stale" : it.state} word=${it.is_stale ? "no heartbeat" : it.state} /><//></td>
        <td class="num pid">${integer(it.pid)}</td><td class="version">${it.version ?? NOTHING}</td>
        <td class="num">${age(it.age_ns)}</td>
        <td class="actions"><${Commands} service=${it} /></td></tr>`,
      )}</tbody>
    </table></div>`
        : html`<p class="none">No service sends a heartbeat here.</p>`
    }</section>`;
}

// The counters of a bridge, asked for while this view is open, and how fast they grow.
function useBridge(service) {
  const [found, setFound] = useState(null);
  const before = useRef(null);
  useEffect(() => {
    let timer = 0;
    let isOver = false;
    const look = async () => {
      try {
        const { result } = await send("POST", pathOf(service.tag), { command: "status" });
        const status = typeof result === "string" ? JSON.parse(result) : result;
        const now = performance.now();
        const last = before.current;
        if (isOver) return;
        setFound({ status, last, seconds: last ? (now - last.now) / 1000 : 0 });
        before.current = { now, counters: status.counters };
      } catch (error) {
        if (!isOver) setFound({ failure: error.message });
      }
      if (!isOver) timer = setTimeout(look, BRIDGE_MS);
    };
    look();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [service.tag]);
  return found;
}

function mappingRow(name, isSender, counters, before, seconds) {
  const rate = (key) => (before && seconds ? Math.max(0, (counters[key] ?? 0) - (before[key] ?? 0)) / seconds : null);
  const [frames, bytes] = isSender ? ["frames_sent", "bytes_sent"] : ["frames_received", "bytes_received"];
  const drops = Object.fromEntries(
    Object.entries(counters)
      .filter(([key]) => key.startsWith("frames_dropped"))
      .map(([key, count]) => [key.split(".")[1] || "unknown", count]),
  );
  return { name, isSender, hz: rate(frames), bytes: rate(bytes), total: counters[frames] ?? 0, drops };
}

function Bridge({ service }) {
  const found = useBridge(service);
  const title = html`<h2>${service.tag.replace(/^service:/, "")} <small>${found?.failure ?? ""}</small></h2>`;
  if (!found?.status)
    return html`<section class="panel flush">${title}<p class="none">Asking for its counters…</p></section>`;
  const { status, last, seconds } = found;
  const rows = status.mappings.map((name) =>
    mappingRow(name, !(name in status.destinations), status.counters[name] ?? {}, last?.counters[name], seconds),
  );
  return html`<section class="panel flush">${title}<div class="scroll"><table class="grid bridges">
    <thead><tr><th class="name">mapping</th><th class="wide-only">direction</th><th class="num">Hz</th>
    <th class="num">MiB/s</th><th class="num wide-only">frames</th><th>lost</th></tr></thead>
    <tbody>${rows.map(
      (it) => html`<tr key=${it.name}><th scope="row" class="name">${it.name}
      ${status.failures[it.name] && html`<small class="trouble">${status.failures[it.name]}</small>`}</th>
      <td class="wide-only">${it.isSender ? "sends" : "receives"}</td><td class="num">${number(it.hz)}</td>
      <td class="num">${mib(it.bytes)}</td>
      <td class="num wide-only">${it.total}</td><td><${Marked} of=${counts(it.drops)}>${counts(it.drops) || "none"}<//>
      </td></tr>`,
    )}</tbody>
  </table></div></section>`;
}

function Memory() {
  const [memory, failure] = usePolled("/api/memory", MEMORY_MS);
  if (!memory)
    return html`<section class="panel"><h2>Memory <small>${failure}</small></h2><p class="none">Measuring…</p></section>`;
  const streams = [...memory.streams].sort((one, other) => other.bytes - one.bytes);
  const ours = streams.reduce((sum, it) => sum + it.bytes, 0);
  const used = memory.total_bytes - memory.free_bytes;
  const width = (bytes) => ({ width: `${(100 * bytes) / memory.total_bytes}%` });
  return html`<section class="panel"><h2>Memory <small>${memory.path}</small></h2>
    <div class="bar-of" role="img" aria-label=${`${size(ours)} by streams, ${size(used)} of ${size(memory.total_bytes)} used`}>
      <span class="ours" style=${width(ours)}></span><span class="others" style=${width(Math.max(0, used - ours))}>
      </span></div>
    <p class="legend"><span><i class="cell c"></i>${size(ours)} streams</span><span><i class="cell o">
    </i>${size(Math.max(0, used - ours))} other files</span>
      <span><i class="cell s"></i>${size(memory.free_bytes)} free of ${size(memory.total_bytes)}</span></p>
    <table class="grid memory"><thead><tr><th class="name">stream</th><th class="num">epoch</th>
    <th class="num">size</th><th class="num wide-only">share</th></tr></thead>
      <tbody>${streams.map(
        (it) => html`<tr key=${`${it.stream_id} ${it.epoch}`} class=${it.is_current ? "" : "faint"}>
        <th scope="row" class="name">
          <a href=${hrefOf("streams", it.stream_id)}>${it.name ?? it.stream_id}</a>${!it.is_current && html` <small>old epoch</small>`}</th>
        <td class="num" title=${String(it.epoch)}>${String(it.epoch).slice(-6)}</td><td class="num">${size(it.bytes)}</td>
        <td class="num wide-only">${percent(it.bytes / memory.total_bytes)}</td></tr>`,
      )}</tbody></table>
  </section>`;
}

function Doctor() {
  const [found, failure, again] = usePolled("/api/doctor", DOCTOR_MS);
  const worstFirst = { FAIL: 0, WARN: 1, OK: 2 };
  const findings = [...(found?.findings ?? [])].sort((one, other) => worstFirst[one.level] - worstFirst[other.level]);
  const summary = found
    ? `${counted(found.failures, "failure")}, ${counted(found.warnings, "warning")}, ${findings.length - found.failures - found.warnings} ok`
    : failure;
  return html`<section class="panel"><h2>Doctor <small>${summary}</small>
    <button class="small" onClick=${again}>Examine</button></h2>
    ${
      found
        ? html`<ul class="findings">${findings.map(
            (it) => html`<li key=${it.check + it.found}>
      <${Sign} state=${it.level} word=${it.level} /><b>${it.check}</b>
        <span>${it.found}${it.remedy && html`<em>→ ${it.remedy}</em>`}</span></li>`,
          )}</ul>`
        : html`<p class="none">${failure || "Examining this host…"}</p>`
    }</section>`;
}

function Events() {
  const changes = (state.value?.changes ?? []).slice(-EVENTS).reverse();
  return html`<section class="panel"><h2>Events <small>newest first</small></h2>
    ${
      changes.length
        ? html`<ol class="events">${changes.map(
            (it) => html`<li key=${it.number}>
      <time>${clock(it.time_ns)}</time>
      <span class="kind ${BAD.has(it.kind) ? "warn" : ""}">${BAD.has(it.kind) ? "▲" : "·"} ${it.kind}</span>
      <span>${it.text}</span></li>`,
          )}</ol>`
        : html`<p class="none">Nothing has changed yet.</p>`
    }</section>`;
}

export function Services() {
  const bridges = (state.value?.services ?? []).filter((it) => it.service === "bridge" && !it.is_stale);
  return html`
    <h1 class="aside">Services and host</h1>
    <${ServiceTable} />
    ${bridges.map((it) => html`<${Bridge} key=${it.tag} service=${it} />`)}
    <div class="two">
      <${Doctor} />
      <${Memory} />
    </div>
    <${Events} />`;
}
