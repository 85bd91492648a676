// SPDX-License-Identifier: Apache-2.0
// The view of all streams: a table that is sorted, searched and filtered, and never jumps under the pointer.
import { computed, html, signal, useEffect, useRef } from "./vendor.js";
import { Consumers } from "./consumers.js";
import { age, counted, epoch, frame, integer, mib, nameOf, NOTHING, number } from "./format.js";
import { useKeys } from "./keys.js";
import { Marked } from "./marked.js";
import { go, hrefOf } from "./route.js";
import { CONSUMER_STATES, Sign, STREAM_STATES, worst } from "./signs.js";
import { Sparkline } from "./sparkline.js";
import { consumersOf, history, lost, state, streams } from "./state.js";

const MOST_ROWS = 200;
const SORT_AGAIN_MS = 5000; // by a value that changes every second; never while the pointer is over the table

const search = signal("");
const shownState = signal(""); // "": every
const sorting = signal({ key: "name", isDown: false });
const opened = signal(new Set()); // streams whose consumers are shown
const order = signal([]); // stream ids
const columns = signal(1); // that are shown at this width: what spans more would make the table wider

const readersOf = (stream) => consumersOf.value.get(stream.stream_id) ?? [];
const mostLag = (stream) => readersOf(stream).reduce((most, it) => Math.max(most, it.lag ?? 0), 0);

// Heading, class of its cells, what it is sorted by.
const COLUMNS = {
  name: ["stream", "name", (it) => nameOf(it).toLowerCase()],
  state: ["state", "state", (it) => STREAM_STATES.indexOf(it.state)],
  frame: ["frame", "frame", (it) => it.frame_bytes ?? -1],
  rate: ["Hz", "num hz", (it) => it.rate_hz ?? -1],
  bytes: ["MiB/s", "num", (it) => it.bytes_per_s ?? -1],
  age: ["newest", "num age", (it) => it.frame_age_ns ?? Infinity],
  ring: ["ring", "num ring", (it) => it.ring_s ?? -1],
  epoch: ["epoch", "num epoch", (it) => it.epoch ?? ""],
  producer: ["producer", "num producer", (it) => it.producer_id ?? -1],
  readers: ["consumers", "readers", (it) => it.consumers],
  lag: ["lag", "num lag", mostLag],
  lost: ["lost", "num lost", (it) => lost(readersOf(it))],
  spark: ["last ten minutes", "spark", null],
};

function isShown(stream) {
  if (shownState.value && stream.state !== shownState.value) return false;
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [stream.name, stream.stream_id, stream.dtype, stream.summary, ...stream.tags].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function sorted(list) {
  const { key, isDown } = sorting.value;
  const by = COLUMNS[key][2];
  const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
  const found = list.map((it) => [by(it), it]);
  found.sort(([one, a], [other, b]) => (isDown ? -1 : 1) * compare(one, other) || a.stream_id - b.stream_id);
  return found.map(([, it]) => it);
}

const rows = computed(() => {
  const places = new Map(order.value.map((id, place) => [id, place]));
  const found = sorted(streams.value.filter(isShown));
  if (sorting.value.key === "name") return found;
  // By a value that changes: streams keep their places until the next sorting; new ones are at the end.
  return found.sort((one, other) => (places.get(one.stream_id) ?? 1e9) - (places.get(other.stream_id) ?? 1e9));
});

function sortAgain() {
  order.value = sorted(streams.value).map((it) => it.stream_id);
}

function sortBy(key) {
  const { key: before, isDown } = sorting.value;
  sorting.value = { key, isDown: before === key ? !isDown : key !== "name" && key !== "state" };
  sortAgain();
}

function toggle(id) {
  const next = new Set(opened.value);
  if (!next.delete(id)) next.add(id);
  opened.value = next;
}

function Totals() {
  const all = streams.value;
  const live = all.filter((it) => it.state === "live");
  const consumers = state.value?.consumers ?? [];
  const sum = (list, of) => list.reduce((total, it) => total + (of(it) ?? 0), 0);
  const others = (list, fine, states) =>
    states
      .filter((it) => it !== fine)
      .map((it) => [it, list.filter((one) => one.state === it).length])
      .filter(([, count]) => count);
  const Total = ({ label, value, unit, children }) =>
    html`<div class="total"><span class="label">${label}</span><b>${value}<small>${unit}</small></b>
      <span class="detail">${children}</span></div>`;
  const detail = (list, fine, states) => {
    const found = others(list, fine, states);
    return found.length
      ? found.map(([it, count]) => html`<${Sign} key=${it} state=${it} word=${`${count} ${it}`} />`)
      : list.length
        ? html`<${Sign} state=${fine} word=${`all ${fine}`} />`
        : "none";
  };
  const perSecond = sum(consumers, (it) => it.drops_per_s);
  return html`<section class="totals" aria-label="Totals">
    <${Total} label="streams" value=${all.length}>${detail(all, "live", STREAM_STATES)}<//>
    <${Total} label="frames" value=${number(sum(live, (it) => it.rate_hz))} unit="Hz">${counted(live.length, "live stream")}<//>
    <${Total} label="throughput" value=${mib(sum(live, (it) => it.bytes_per_s))} unit="MiB/s">into shared memory<//>
    <${Total} label="consumers" value=${consumers.length}>${detail(consumers, "ok", CONSUMER_STATES)}<//>
    <${Total} label="frames lost" value=${number(perSecond)} unit="/s">${lost(consumers)} in all<//>
  </section>`;
}

function Filters() {
  const counts = new Map(STREAM_STATES.map((it) => [it, streams.value.filter((one) => one.state === it).length]));
  const Choice = ({
    value,
    word,
  }) => html`<button class="choice" aria-pressed=${shownState.value === value ? "true" : "false"}
    onClick=${() => (shownState.value = value)}>${word}</button>`;
  return html`<div class="filters">
    <input type="search" placeholder="Search streams   /" aria-label="Search streams" value=${search.value}
      onInput=${(event) => (search.value = event.target.value)} />
    <div class="choices" role="group" aria-label="States">
      <${Choice} value="" word=${`all ${streams.value.length}`} />
      ${STREAM_STATES.toReversed().map(
        (it) => html`<${Choice} key=${it} value=${it}
        word=${html`<${Sign} state=${it} word=${`${it} ${counts.get(it)}`} />`} />`,
      )}
    </div>
  </div>`;
}

function Headings() {
  const { key: by, isDown } = sorting.value;
  return html`<tr>${Object.entries(COLUMNS).map(
    ([key, [title, kind, value]]) => html`<th key=${key} class=${kind} scope="col"
    aria-sort=${by === key ? (isDown ? "descending" : "ascending") : undefined}>
    ${value ? html`<button onClick=${() => sortBy(key)}>${title}</button>` : title}
  </th>`,
  )}</tr>`;
}

function Row({ stream, toS }) {
  const consumers = readersOf(stream);
  const isOpened = opened.value.has(stream.stream_id);
  const condition = worst(
    consumers.map((it) => it.state),
    CONSUMER_STATES,
  );
  const losses = lost(consumers);
  const gaps = consumers.reduce((sum, it) => sum + it.drops_gap, 0);
  const trouble = stream.state !== "stale" && (stream.layout_flaw ?? stream.region_fault);
  return html`
    <tr class=${stream.state === "stale" ? "stream faint" : "stream"} data-stream=${stream.stream_id}
      onClick=${(event) => !event.target.closest("a, button") && go("streams", stream.stream_id)}>
      <th scope="row" class="name">
        <a href=${hrefOf("streams", stream.stream_id)} data-row=${stream.stream_id}>${nameOf(stream)}</a>
        <small>${stream.name !== null && stream.stream_id}${trouble && html` <em title=${trouble}>cannot be mapped</em>`}</small>
        <small class="narrow"><${Sign} state=${stream.state} />${frame(stream)}</small>
      </th>
      <td class="state"><${Marked} of=${stream.state}><${Sign} state=${stream.state} /><//></td>
      <td class="frame"><${Marked} of=${frame(stream)}>${frame(stream)}<//></td>
      <td class="num hz">${number(stream.rate_hz)}</td>
      <td class="num">${mib(stream.bytes_per_s)}</td>
      <td class="num age">${age(stream.frame_age_ns)}</td>
      <td class="num ring">${stream.ring_s == null ? NOTHING : `${number(stream.ring_s)} s`}</td>
      <td class="num epoch" title=${integer(stream.epoch)}><${Marked} of=${stream.epoch}>${epoch(stream.epoch)}<//></td>
      <td class="num producer"><${Marked} of=${stream.producer_id}>${integer(stream.producer_id)}<//></td>
      <td class="readers">
        <button class="fold" aria-expanded=${isOpened ? "true" : "false"} onClick=${() => toggle(stream.stream_id)}
          aria-label=${`consumers of ${nameOf(stream)}`}>
          <i aria-hidden="true">${isOpened ? "▾" : "▸"}</i>
          <${Marked} of=${condition}>${condition ? html`<${Sign} state=${condition} word=${consumers.length} />` : "0"}<//>
        </button>
      </td>
      <td class="num lag">${consumers.length ? mostLag(stream) : NOTHING}</td>
      <td class="num lost" title=${losses ? `gap ${gaps}, late ${losses - gaps}` : ""}>
        <${Marked} of=${losses}>${losses}<//></td>
      <td class="spark"><${Sparkline} points=${history.value.get(stream.stream_id)} toS=${toS} /></td>
    </tr>
    ${isOpened && html`<tr class="inner"><td colspan=${columns.value}><${Consumers} consumers=${consumers} /></td></tr>`}`;
}

function Empty() {
  if (state.value === null) return html`<p class="empty">Waiting for the console…</p>`;
  if (streams.value.length) return html`<p class="empty">No stream matches.</p>`;
  return html`<div class="empty"><p>No stream is announced here yet.</p>
    <p>Start one: <code>tensorpool produce camera/front</code></p></div>`;
}

export function Streams() {
  const table = useRef(null);
  useEffect(() => {
    const timer = setInterval(() => !table.current?.matches(":hover, :focus-within") && sortAgain(), SORT_AGAIN_MS);
    const headings = [...table.current.querySelectorAll("thead th")];
    const observer = new ResizeObserver(() => (columns.value = headings.filter((it) => it.offsetWidth).length));
    observer.observe(table.current);
    return () => {
      clearInterval(timer);
      observer.disconnect();
    };
  }, []);
  const move = (by) => {
    const links = [...(table.current?.querySelectorAll("a[data-row]") ?? [])];
    const place = links.indexOf(document.activeElement);
    links[place < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, place + by))]?.focus();
  };
  const focused = () => Number(document.activeElement?.dataset?.row);
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    e: () => focused() && toggle(focused()),
  });
  const found = rows.value;
  const toS = Math.floor((state.value?.time_ns ?? 0) / 1e9);
  return html`
    <h1 class="aside">Streams</h1>
    <${Totals} />
    <${Filters} />
    <div class="panel flush" ref=${table}>
      <table class="grid streams">
        <thead><${Headings} /></thead>
        <tbody>${found.slice(0, MOST_ROWS).map((it) => html`<${Row} key=${it.stream_id} stream=${it} toS=${toS} />`)}</tbody>
      </table>
      ${!found.length && html`<${Empty} />`}
      ${found.length > MOST_ROWS && html`<p class="empty">The first ${MOST_ROWS} of ${found.length}: search for the others.</p>`}
    </div>`;
}
