// SPDX-License-Identifier: Apache-2.0
// A WebSocket that opens itself again, and JSON whose integers stay exact.

const FIRST_MS = 400;
const LONGEST_MS = 5000;

const EXACT = /^(epoch|seq|newest|.*_(id|seq))$/;

// An epoch, id or seq beyond 2^53 becomes its digits; times lose some nanoseconds instead.
export const parse = (text) =>
  JSON.parse(text, (key, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && EXACT.test(key) && context ? context.source : value,
  );

export class Socket {
  // `on` has open, text (parsed), binary and lost; each may be left out.
  constructor(path, on) {
    this.path = path;
    this.on = on;
    this.wait = FIRST_MS;
    this.timer = null;
    this.isClosed = false;
    this.wake = () => document.visibilityState === "visible" && this.timer && this.open();
    addEventListener("online", this.wake);
    document.addEventListener("visibilitychange", this.wake);
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    this.timer = null;
    const socket = new WebSocket(new URL(this.path, location.href.replace(/^http/, "ws")));
    this.socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      this.on.open?.();
    };
    socket.onmessage = ({ data }) => {
      this.wait = FIRST_MS; // a server that accepts and closes at once is not asked faster and faster
      if (typeof data === "string") this.on.text?.(parse(data));
      else this.on.binary?.(data);
    };
    socket.onclose = (event) => {
      if (this.isClosed || socket !== this.socket) return;
      this.on.lost?.(event.reason);
      this.timer = setTimeout(() => this.open(), this.wait * (0.8 + 0.4 * Math.random()));
      this.wait = Math.min(LONGEST_MS, this.wait * 1.7);
    };
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    removeEventListener("online", this.wake);
    document.removeEventListener("visibilitychange", this.wake);
    this.socket.close();
  }
}
