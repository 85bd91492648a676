// SPDX-License-Identifier: Apache-2.0
// Frames of one stream as the console sends them: one in flight, the next after our acknowledgement.
import { signal } from "./vendor.js";
import { parse, Socket } from "./socket.js";

const LATENCIES = 240; // pictures whose latency is plotted
const ASK_MS = 100; // the least time between two questions for a pixel or a profile

// A picture as it was sent: no colour management, so that its pixels are the server's.
export const decode = (bytes, media) =>
  createImageBitmap(new Blob([bytes], { type: media }), { colorSpaceConversion: "none", premultiplyAlpha: "none" });

const visible = () =>
  new Promise((done) => {
    const look = () => {
      if (document.visibilityState !== "visible") return;
      document.removeEventListener("visibilitychange", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });

export class Preview {
  constructor(streamId, look) {
    this.look = look;
    this.header = signal(null);
    this.line = signal(null); // pairs of a one-dimensional array
    this.status = signal("connecting…");
    this.error = signal("");
    this.isPaused = signal(false);
    this.pixel = signal(null);
    this.profile = signal(null);
    this.latencies = signal([]); // [seconds since 1970, ms]
    this.onPicture = null; // (bitmap, header)
    this.hasHistogram = false;
    this.questions = {}; // by type: the newest that was not sent yet
    this.askedMs = 0;
    this.socket = new Socket(`/ws/preview/${streamId}`, {
      open: () => this.begin(),
      text: (message) => this.answer(message),
      binary: (data) => this.receive(data),
      lost: (reason) => (this.status.value = reason || "connecting again…"),
    });
  }

  begin() {
    this.status.value = "waiting for a frame…";
    this.socket.send({ type: "look", look: this.look });
    if (this.hasHistogram) this.socket.send({ type: "histogram", on: true });
    if (this.isPaused.value) this.socket.send({ type: "pause" });
  }

  setLook(look) {
    this.look = look;
    this.error.value = "";
    this.socket.send({ type: "look", look });
  }

  setHistogram(isOn) {
    this.hasHistogram = isOn;
    this.socket.send({ type: "histogram", on: isOn });
  }

  setPaused(isPaused) {
    this.isPaused.value = isPaused;
    this.socket.send({ type: isPaused ? "pause" : "resume" });
  }

  step() {
    if (!this.isPaused.value) this.setPaused(true);
    this.socket.send({ type: "step" });
  }

  // Of several questions in a hurry only the newest is sent.
  ask(question) {
    this.questions[question.type] = question;
    if (this.timer) return;
    const wait = Math.max(0, this.askedMs + ASK_MS - performance.now());
    this.timer = setTimeout(() => {
      this.timer = null;
      this.askedMs = performance.now();
      for (const one of Object.values(this.questions)) this.socket.send(one);
      this.questions = {};
    }, wait);
  }

  answer(message) {
    if (message.type === "pixel") this.pixel.value = message;
    else if (message.type === "profile") this.profile.value = message.values;
    else if (message.type === "status") this.status.value = message.text;
    else if (message.type === "error") this.error.value = message.text;
  }

  async receive(data) {
    const length = new DataView(data).getUint32(0, true);
    const header = parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
    const bytes = new Uint8Array(data, 4 + length);
    try {
      if (header.media === "line") {
        this.line.value = new Float32Array(bytes.slice().buffer);
      } else {
        const bitmap = await decode(bytes, header.media);
        this.line.value = null;
        this.onPicture?.(bitmap, header);
        bitmap.close();
      }
      this.status.value = "";
      this.header.value = header;
      const now = Date.now() / 1000;
      if (header.latency_ms != null)
        this.latencies.value = [...this.latencies.value.slice(1 - LATENCIES), [now, header.latency_ms]];
    } catch (error) {
      this.error.value = `this picture cannot be drawn: ${error.message}`;
    }
    await visible(); // a page in the background gets no further picture
    this.socket.send({ type: "ack", number: header.number });
  }

  close() {
    clearTimeout(this.timer);
    this.onPicture = null;
    this.socket.close();
  }
}
