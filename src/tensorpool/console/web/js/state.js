// SPDX-License-Identifier: Apache-2.0
// What the console knows: the newest state, how old it is, and ten minutes of each stream.
import { computed, signal } from "./vendor.js";
import { request } from "./api.js";
import { Socket } from "./socket.js";

const HISTORY_S = 600;
const POINT_S = 5;
const FRESH_MS = 2500; // a state comes once a second
const TICK_MS = 250;

export const hello = signal(null);
export const state = signal(null);
const receivedMs = signal(0); // performance.now() of the newest state
export const gone = signal(""); // why the media driver or the supervisor is away
export const isConnected = signal(false);
export const refusal = signal(""); // why asking again cannot help
const nowMs = signal(performance.now());
// By stream id: {t, rate, bytes, drops}, where t is in seconds and drops are since the point before.
export const history = signal(new Map());

export const ageMs = computed(() => (state.value === null ? null : Math.max(0, nowMs.value - receivedMs.value)));
export const isFresh = computed(
  () => isConnected.value && !gone.value && ageMs.value !== null && ageMs.value < FRESH_MS,
);
export const streams = computed(() => state.value?.streams ?? []);
export const consumersOf = computed(() => {
  const found = new Map();
  for (const consumer of state.value?.consumers ?? []) {
    const others = found.get(consumer.stream_id);
    if (others) others.push(consumer);
    else found.set(consumer.stream_id, [consumer]);
  }
  return found;
});

export const lost = (consumers) => consumers.reduce((sum, it) => sum + it.drops_gap + it.drops_late, 0);

function onHello(message) {
  hello.value = message;
  const inSeconds = ({ t, ...columns }) => ({ t: t.map((ns) => Math.floor(ns / 1e9)), ...columns });
  history.value = new Map(Object.entries(message.history).map(([id, points]) => [Number(id), inSeconds(points)]));
}

function onState(message) {
  receivedMs.value = nowMs.value = performance.now();
  gone.value = "";
  state.value = message;
  remember(message);
}

const lostBefore = new Map(); // by stream id: of all its consumers, at the last point

// The server sends ten minutes once, with its hello; afterwards the page adds its own points at the same distance.
function remember(message) {
  const seconds = Math.floor(message.time_ns / 1e9);
  let isChanged = false;
  const points = history.value;
  for (const stream of message.streams) {
    let kept = points.get(stream.stream_id);
    if (!kept) points.set(stream.stream_id, (kept = { t: [], rate: [], bytes: [], drops: [] }));
    if (kept.t.length && seconds - kept.t.at(-1) < POINT_S) continue;
    isChanged = true;
    const losses = lost(consumersOf.value.get(stream.stream_id) ?? []);
    kept.t.push(seconds);
    kept.rate.push(stream.rate_hz);
    kept.bytes.push(stream.bytes_per_s);
    kept.drops.push(Math.max(0, losses - (lostBefore.get(stream.stream_id) ?? losses)));
    lostBefore.set(stream.stream_id, losses);
    while (kept.t[0] < seconds - HISTORY_S) for (const column of Object.values(kept)) column.shift();
  }
  if (isChanged) history.value = new Map(points);
}

// A socket that is refused does not say why; a request does.
async function explain() {
  try {
    await request("/api/state");
    refusal.value = "";
  } catch (error) {
    refusal.value = error.status === 401 ? error.message : "";
  }
}

export function connect() {
  new Socket("/ws/state", {
    open() {
      isConnected.value = true;
      refusal.value = "";
    },
    text(message) {
      if (message.type === "hello") onHello(message);
      else if (message.type === "state") onState(message);
      else if (message.type === "gone") gone.value = message.why;
    },
    lost() {
      isConnected.value = false;
      explain();
    },
  });
  setInterval(() => (nowMs.value = performance.now()), TICK_MS);
}
