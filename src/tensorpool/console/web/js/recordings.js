// SPDX-License-Identifier: Apache-2.0
// The view of recordings: the lakes that the console was given, and one stream of one of them over time.
import { html, signal, useEffect, useMemo, useState } from "./vendor.js";
import { send, usePolled } from "./api.js";
import { ask, notify } from "./dialog.js";
import { age, clock, counted, epoch, moment, nameOf, number, percent, shape, size } from "./format.js";
import { useKeys } from "./keys.js";
import { LivePicture, usePreview } from "./live_view.js";
import { LookControls } from "./look.js";
import { Player } from "./player.js";
import { hrefOf } from "./route.js";
import { streams as liveStreams } from "./state.js";
import { Losses, Timeline, wordOf } from "./timeline.js";
import { Placement, Viewport } from "./viewport.js";

const LAKES_MS = 3000;
const TIMELINE_MS = 10000;
const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 64];

const lostOf = (stream) => Object.values(stream.lost).reduce((sum, count) => sum + count, 0);
const titleOf = (stream) => stream.stream ?? `stream ${stream.stream_id}`;
// A recorder is given ids.
const nameOfId = (id) => liveStreams.value.find((it) => String(it.stream_id) === String(id))?.name ?? id;
const keyOf = (stream) => String(stream.stream ?? stream.stream_id);

async function startRecording(lake, again) {
  const chosen = signal(new Set());
  const names = liveStreams.value.filter((it) => it.producer_id !== null).map(nameOf);
  const toggle = (name) => {
    const next = new Set(chosen.value);
    if (!next.delete(name)) next.add(name);
    chosen.value = next;
  };
  const Choices = () => html`<div class="streams-to-record">${names.map(
    (name) => html`<label class="check" key=${name}>
    <input type="checkbox" checked=${chosen.value.has(name)} onChange=${() => toggle(name)} /> ${name}</label>`,
  )}
    ${!names.length && html`<p class="none">No stream has a producer.</p>`}</div>`;
  if (
    !(await ask(
      `Record into ${lake.name}`,
      "Every frame of these streams is written until you stop it.",
      "Record",
      html`<${Choices} />`,
    ))
  )
    return;
  if (!chosen.value.size) return notify("No stream was chosen: nothing is recorded.", true);
  await act(lake, () => send("POST", pathOf(lake), { streams: [...chosen.value] }), again);
}

async function stopRecording(lake, again) {
  if (await ask(`Stop recording into ${lake.name}?`, "What was received so far is written and committed.", "Stop")) {
    await act(lake, () => send("DELETE", pathOf(lake)), again);
  }
}

const pathOf = (lake) => `/api/lakes/${encodeURIComponent(lake.name)}/recording`;

async function act(lake, request, again) {
  try {
    await request();
  } catch (error) {
    notify(`${lake.name}: ${error.message}`, true);
  }
  again();
}

function Lake({ lake, selected, again }) {
  const { recording } = lake;
  return html`<section class="panel flush lake" data-lake=${lake.name}>
    <h2>${lake.name} <small>${lake.path}</small>
      ${
        recording?.is_running
          ? html`<span class="recording" title=${recording.text}>
            <i aria-hidden="true">●</i> recording ${recording.streams.map(nameOfId).join(", ")} since ${clock(recording.since)}</span>
            <button class="small" onClick=${() => stopRecording(lake, again)}>Stop</button>`
          : html`<span class="recording off ${recording?.exit_code ? "trouble" : ""}" title=${recording?.text ?? ""}>
              ${recording?.text ?? ""}</span>
            <button class="small" onClick=${() => startRecording(lake, again)}>Record…</button>`
      }
    </h2>
    ${
      lake.streams.length
        ? html`<div class="scroll"><table class="grid lakes">
      <thead><tr><th class="name">stream</th><th class="num">frames</th><th class="num">size</th>
      <th class="num wide">epochs</th><th class="when">from</th><th class="num">long</th><th class="losses">lost</th>
      </tr></thead>
      <tbody>${[...lake.streams]
        .sort((one, other) => keyOf(one).localeCompare(keyOf(other)))
        .map(
          (it) => html`<tr key=${keyOf(it)} class=${selected === keyOf(it) ? "selected" : ""}>
        <th scope="row" class="name">
        <a href=${hrefOf("recordings", lake.name, keyOf(it))} data-row=${keyOf(it)} 
          aria-current=${selected === keyOf(it) ? "true" : undefined}>${titleOf(it)}</a>
        </th>
        <td class="num">${it.frames}</td><td class="num">${size(it.bytes)}</td><td class="num wide">${it.epochs}</td>
        <td class="when">${moment(it.from)}</td><td class="num">${age(it.to - it.from)}</td>
        <td class="losses"><${Losses} byReason=${it.lost} /></td></tr>`,
        )}</tbody>
    </table></div>`
        : html`<p class="none">${lake.error ?? "Nothing is recorded here yet."}</p>`
    }
  </section>`;
}

function Statistics({ stream, timeline }) {
  const seconds = Math.max(1e-9, (stream.to - stream.from) / 1e9);
  const lostCount = lostOf(stream);
  const facts = [
    ["frames", String(stream.frames)],
    ["mean rate", `${number(stream.frames / seconds)} Hz`],
    ["size", size(stream.bytes)],
    ["a frame", stream.frames ? size(Math.round(stream.bytes / stream.frames)) : "–"],
    ["from", moment(stream.from)],
    ["to", moment(stream.to)],
    ["lost", `${lostCount}, ${percent(lostCount / Math.max(1, lostCount + stream.frames))}`],
    ["gaps", counted(timeline?.gaps.length ?? 0, "gap")],
  ];
  return html`<section class="panel facts"><h2>Statistics</h2>
    <dl>${facts.map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    ${lostCount > 0 && html`<p><${Losses} byReason=${stream.lost} /></p>`}</section>`;
}

function Beside({ stream }) {
  const view = usePreview(stream.stream_id);
  view.hasHistogram.value = false;
  return html`<figure><figcaption>live</figcaption>
    <${LivePicture} view=${view} name=${nameOf(stream)} isSmall=${true} /></figure>`;
}

function Recording({ lake, stream }) {
  const query = new URLSearchParams({ stream: keyOf(stream) });
  const [timeline, failure] = usePolled(`/api/lakes/${encodeURIComponent(lake.name)}/timeline?${query}`, TIMELINE_MS);
  const [isBeside, setBeside] = useState(false);
  const player = useMemo(() => new Player(lake.name, keyOf(stream)), [lake.name, keyOf(stream)]);
  const placement = useMemo(() => new Placement(), [player]);
  useEffect(() => () => player.close(), [player]);
  useEffect(() => {
    if (!timeline) return;
    player.begin = timeline.from;
    player.end = timeline.to;
    if (player.at.value === null) player.seek(timeline.from);
  }, [timeline]);
  const toggle = () => (player.isPlaying.value ? (player.isPlaying.value = false) : player.play());
  useKeys({
    " ": toggle,
    ArrowLeft: () => player.step(-1),
    ArrowRight: () => player.step(1),
    Home: () => timeline && player.seek(timeline.from),
    End: () => timeline && player.seek(timeline.to),
    "+": () => placement.zoom(1.4),
    "=": () => placement.zoom(1.4),
    "-": () => placement.zoom(1 / 1.4),
    0: () => placement.whole(),
  });
  const header = player.header.value;
  const live = liveStreams.value.find((it) => it.name === stream.stream || it.stream_id === stream.stream_id);
  return html`<div class="stage">
    <section class="panel flush recorded">
      <div class="toolbar" role="toolbar" aria-label="Player">
        <button class="wide" onClick=${toggle} aria-pressed=${player.isPlaying.value ? "true" : "false"} title="Space">
          ${player.isPlaying.value ? "‖ Stop" : "▶ Play"}</button>
        <button onClick=${() => player.step(-1)} aria-label="One frame back" title="←">◂</button>
        <button onClick=${() => player.step(1)} aria-label="One frame further" title="→">▸</button>
        <label>speed <select value=${player.speed.value} onChange=${(event) => player.setSpeed(Number(event.target.value))}>
          ${SPEEDS.map((it) => html`<option key=${it} value=${it}>${it}×</option>`)}</select></label>
        <label class="check">
        <input type="checkbox" checked=${isBeside} disabled=${!live} onChange=${(event) => setBeside(event.target.checked)} /> beside the live one</label>
        <span class="space"></span>
        <a class="button" download href=${header ? player.saved : undefined}>NPY</a>
      </div>
      <div class=${isBeside && live ? "pair" : ""}>
        <figure><figcaption>${isBeside && live ? "recorded" : ""}</figcaption>
          <div class="picture">
          <${Viewport} source=${player} placement=${placement} label=${`recorded frame of ${titleOf(stream)}`}
            onWanted=${(wanted) => player.setLook({ ...player.look.value, ...wanted })}>
            ${(player.failure.value || failure) && html`<p class="status strip" role="status">${player.failure.value || failure}</p>`}
          <//>
          <p class="readout"><span class="pixel"><b>${header ? moment(header.time) : ""}</b></span>
            <span>${header ? `seq ${header.seq}` : ""}</span>
            <span class="wide-only">${header ? `epoch ${epoch(header.epoch)}` : ""}</span>
            <span class="wide-only">${header ? `${shape(header.shape)} ${header.dtype}` : ""}</span></p></div>
        </figure>
        ${isBeside && live && html`<${Beside} key=${live.stream_id} stream=${live} />`}
      </div>
      ${timeline ? html`<${Timeline} timeline=${timeline} at=${player.at.value} onAt=${(at) => player.seek(at)} />` : html`<p class="none">Reading the log…</p>`}
      <${LookControls} look=${player.look.value} header=${header} onLook=${(look) => player.setLook(look)} />
    </section>
    <div class="side"><${Statistics} stream=${stream} timeline=${timeline} />
      <${Gaps} gaps=${timeline?.gaps ?? []} onAt=${(at) => player.seek(at)} /></div>
  </div>`;
}

function Gaps({ gaps, onAt }) {
  return html`<section class="panel"><h2>Gaps <small>${gaps.length || "none"}</small></h2>
    <ol class="gaps">${gaps.slice(0, 200).map(
      (it, index) => html`<li key=${index}><button onClick=${() => onAt(it.time)}>
      <time>${clock(it.time)}</time><span>${counted(it.frames, "frame")}</span><span>${wordOf(it.reason)}</span>
      </button></li>`,
    )}</ol></section>`;
}

export function Recordings({ lake: lakeName, stream: streamKey }) {
  const [lakes, failure, again] = usePolled("/api/lakes", LAKES_MS);
  if (!lakes) return html`<h1 class="aside">Recordings</h1><p class="empty">${failure || "Reading the lakes…"}</p>`;
  const lake = lakes.find((it) => it.name === lakeName);
  const stream = lake?.streams.find((it) => keyOf(it) === streamKey);
  return html`
    <h1 class="aside">Recordings</h1>
    ${!lakes.length && html`<div class="empty"><p>This console was given no lake.</p>
      <p>Name one: <code>tensorpool console --lake /path/to/lake</code></p></div>`}
    ${lakes.map((it) => html`<${Lake} key=${it.name} lake=${it} selected=${it === lake ? streamKey : null} again=${again} />`)}
    ${
      stream
        ? html`<${Recording} key=${`${lake.name}/${keyOf(stream)}`} lake=${lake} stream=${stream} />`
        : lakes.some((it) => it.streams.length) && html`<p class="empty">Choose a stream to look at its frames.</p>`
    }`;
}
