// SPDX-License-Identifier: Apache-2.0
// Questions before something is changed, and notices of what came of it.
import { html, signal, useLayoutEffect, useRef } from "./vendor.js";
import { HELP } from "./keys.js";

const NOTICE_MS = 8000;

const question = signal(null); // {title, text, yes, body, answer}
const notices = signal([]); // {number, text, isBad}
let count = 0;

export const isHelpShown = signal(false);

// Resolves to true when the user agrees.
export const ask = (title, text, yes, body = null) =>
  new Promise((answer) => (question.value = { title, text, yes, body, answer }));

export function notify(text, isBad = false) {
  const number = (count += 1);
  notices.value = [...notices.value.slice(-3), { number, text, isBad }];
  setTimeout(() => (notices.value = notices.value.filter((it) => it.number !== number)), NOTICE_MS);
}

function Modal({ title, onClose, children }) {
  const element = useRef(null);
  useLayoutEffect(() => element.current.showModal(), []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose}
    onClick=${(event) => event.target === element.current && element.current.close()}>
    <div class="sheet"><h2>${title}</h2>${children}</div>
  </dialog>`;
}

function Question() {
  const { title, text, yes, body, answer } = question.value;
  const end = (isAgreed) => {
    answer(isAgreed);
    question.value = null;
  };
  return html`<${Modal} title=${title} onClose=${() => question.value && end(false)}>
    <p>${text}</p>
    ${body}
    <div class="row end">
      <button onClick=${() => end(false)} autofocus>Cancel</button>
      <button class="primary" onClick=${() => end(true)}>${yes}</button>
    </div>
  <//>`;
}

function Help() {
  return html`<${Modal} title="Keys" onClose=${() => (isHelpShown.value = false)}>
    <div class="help">
      ${HELP.map(
        ([where, keys]) => html`<section key=${where}>
        <h3>${where}</h3>
        <dl>${keys.map(([key, what]) => html`<dt key=${key}>${key.split(" ").map((one) => html`<kbd>${one}</kbd>`)}</dt>
          <dd>${what}</dd>`)}</dl>
      </section>`,
      )}
    </div>
  <//>`;
}

export function Overlays() {
  return html`
    ${question.value && html`<${Question} key=${question.value.title} />`}
    ${isHelpShown.value && html`<${Help} />`}
    <div class="notices" role="status" aria-live="polite">
      ${notices.value.map((it) => html`<p key=${it.number} class=${it.isBad ? "bad" : ""}>${it.text}</p>`)}
    </div>`;
}
