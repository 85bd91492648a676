// SPDX-License-Identifier: Apache-2.0
// Frames of a recording: one is fetched at a time, so that a fast player shows fewer frames instead of falling behind.
import { signal } from "./vendor.js";
import { request } from "./api.js";
import { DEFAULT_LOOK } from "./look.js";
import { decode } from "./preview.js";
import { parse } from "./socket.js";

const LEAST_MS = 30; // between two frames

// A number holds nanoseconds of today to 256 of them: a microsecond later is never before the first frame.
const moment = (at) => ({ at: Math.round(at) + 1000 });

export class Player {
  constructor(lake, stream) {
    this.path = `/api/lakes/${encodeURIComponent(lake)}/frame`;
    this.stream = stream;
    this.look = signal(DEFAULT_LOOK);
    this.header = signal(null);
    this.line = signal(null);
    this.failure = signal("");
    this.at = signal(null); // ns since 1970
    this.isPlaying = signal(false);
    this.speed = signal(1);
    this.end = Infinity;
    this.onPicture = null;
    this.wanted = null; // the newest question that was not asked yet
    this.target = null; // what is shown, or will be once it has come
    this.isBusy = false;
    this.timer = 0;
  }

  query(where) {
    const look = JSON.stringify(this.look.value);
    return new URLSearchParams({ stream: this.stream, ...where, look });
  }

  // Where the frame that is shown can be saved.
  get saved() {
    const { epoch, seq } = this.header.value;
    return `${this.path}.npy?${new URLSearchParams({ stream: this.stream, epoch, seq })}`;
  }

  // Of several questions in a hurry the newest is asked.
  async show(where) {
    this.wanted = this.target = where;
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.wanted && !this.isClosed) {
      const next = this.wanted;
      this.wanted = null;
      try {
        await this.fetch(next);
        this.failure.value = "";
      } catch (error) {
        if (this.isClosed) break;
        this.failure.value = error.message;
        this.isPlaying.value = false;
      }
    }
    this.isBusy = false;
  }

  async fetch(where) {
    const response = await request(`${this.path}?${this.query(where)}`);
    const header = parse(response.headers.get("X-Frame"));
    const bytes = await response.arrayBuffer();
    if (header.media === "line") this.line.value = new Float32Array(bytes);
    else {
      const bitmap = await decode(bytes, header.media);
      this.line.value = null;
      this.onPicture?.(bitmap, header);
      bitmap.close();
    }
    this.header.value = header;
    if (this.wanted) return; // the user has moved on already
    this.target = { epoch: header.epoch, seq: header.seq };
    if (where.at === undefined) this.at.value = header.time;
  }

  seek(at) {
    this.at.value = at;
    if (this.isPlaying.value) this.start = { at, ms: performance.now() };
    return this.show(moment(at));
  }

  step(by) {
    const header = this.header.value;
    this.isPlaying.value = false;
    if (header) this.show({ epoch: header.epoch, seq: header.seq, step: by });
  }

  setLook(look) {
    if (JSON.stringify(look) === JSON.stringify(this.look.value)) return;
    this.look.value = look;
    if (this.target) this.show(this.target);
  }

  play() {
    this.isPlaying.value = true;
    this.start = { at: this.at.value >= this.end ? this.begin : this.at.value, ms: performance.now() };
    this.turn();
  }

  setSpeed(speed) {
    this.speed.value = speed;
    this.start = { at: this.at.value, ms: performance.now() };
  }

  async turn() {
    clearTimeout(this.timer);
    if (!this.isPlaying.value || this.isClosed) return;
    const began = performance.now();
    const at = this.start.at + (began - this.start.ms) * 1e6 * this.speed.value;
    this.at.value = Math.min(at, this.end);
    await this.show(moment(this.at.value));
    if (at >= this.end) this.isPlaying.value = false;
    this.timer = setTimeout(() => this.turn(), Math.max(0, LEAST_MS - (performance.now() - began)));
  }

  close() {
    this.isClosed = true;
    this.onPicture = null;
    clearTimeout(this.timer);
  }
}
