// SPDX-License-Identifier: Apache-2.0
// The frame of the page: its bar, its views, and how old what it shows is.
import { effect, html, render, signal } from "./vendor.js";
import { isHelpShown, Overlays } from "./dialog.js";
import { age, clock } from "./format.js";
import { useKeys } from "./keys.js";
import { go, hrefOf, route } from "./route.js";
import { Recordings } from "./recordings.js";
import { Services } from "./services.js";
import { ageMs, connect, gone, hello, isConnected, isFresh, refusal, state, streams } from "./state.js";
import { Stream } from "./stream.js";
import { Streams } from "./streams.js";

const VIEWS = [
  ["streams", "Streams"],
  ["recordings", "Recordings"],
  ["services", "Services and host"],
];
const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

const theme = signal(window.tensorpoolTheme.get());

function nextTheme() {
  const names = Object.keys(THEMES);
  theme.value = names[(names.indexOf(theme.value) + 1) % names.length];
  window.tensorpoolTheme.set(theme.value);
}

// The age changes four times a second: only this element is drawn again.
function Age() {
  if (state.value === null) return html`<span class="asof waiting">connecting…</span>`;
  if (isFresh.value) {
    return html`<span class="asof" title="the newest state of the console, once a second">
      <i class="dot" aria-hidden="true">●</i><time data-number=${state.value.number}>${clock(state.value.time_ns)}</time>
    </span>`;
  }
  return html`<span class="asof old" title=${`as of ${clock(state.value.time_ns)}`}>
    <i class="dot" aria-hidden="true">✕</i><time>${age(ageMs.value * 1e6)} old</time>
  </span>`;
}

function Bar({ view }) {
  const [sign, word] = THEMES[theme.value];
  const host = hello.value?.host;
  return html`<header class="bar">
    <a class="brand" href=${hrefOf("streams")}><img src="/web/icon.svg" alt="" width="22" height="22" />
      <b>tensorpool</b>${host && html`<span class="host">${host}</span>`}</a>
    <nav aria-label="Views">
      ${VIEWS.map(
        ([name, title]) => html`<a key=${name} href=${hrefOf(name)} aria-current=${view === name ? "page" : undefined}>
        ${title}</a>`,
      )}
    </nav>
    <${Age} />
    <button class="icon" onClick=${nextTheme} title=${`colours: ${word} (t)`} aria-label=${`Colours: ${word}`}>${sign}</button>
    <button class="icon" onClick=${() => (isHelpShown.value = true)} title="keys (?)" aria-label="Keys">?</button>
  </header>`;
}

// Always there, so that nothing moves when it has something to say.
function Notice() {
  let text = "";
  if (refusal.value) text = refusal.value;
  else if (!isConnected.value && state.value !== null)
    text = "The console does not answer; connecting again. This is the last that was seen.";
  else if (gone.value) text = gone.value;
  else if (!isFresh.value && state.value !== null) text = "The console sends nothing; waiting for it.";
  return html`<p class="notice" role="status" data-is-shown=${text ? "yes" : "no"}>${text}</p>`;
}

function View() {
  const [view = "streams", ...rest] = route.value;
  if (view === "streams" && rest.length) return html`<${Stream} key=${rest[0]} id=${Number(rest[0])} />`;
  if (view === "recordings") return html`<${Recordings} lake=${rest[0]} stream=${rest.slice(1).join("/")} />`;
  if (view === "services") return html`<${Services} />`;
  return html`<${Streams} />`;
}

function App() {
  const [view = "streams"] = route.value;
  useKeys({
    1: () => go("streams"),
    2: () => go("recordings"),
    3: () => go("services"),
    t: nextTheme,
    "?": () => (isHelpShown.value = true),
    Escape: () =>
      document.activeElement?.matches("input, select")
        ? document.activeElement.blur()
        : route.value.length > 1 && go(view),
    "/": () => document.querySelector("input[type=search]")?.focus(),
  });
  return html`
    <${Bar} view=${view} />
    <${Notice} />
    <main class=${isFresh.value || state.value === null ? "" : "faded"}><${View} /></main>
    <${Overlays} />`;
}

effect(() => {
  const [view = "streams", id] = route.value;
  const stream = id && streams.value.find((it) => it.stream_id === Number(id));
  const title = view === "streams" && stream ? (stream.name ?? id) : VIEWS.find(([name]) => name === view)?.[1];
  document.title = title ? `${title} · tensorpool` : "tensorpool";
});

connect();
render(html`<${App} />`, document.getElementById("app"));
