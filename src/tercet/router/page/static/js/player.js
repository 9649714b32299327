// A recorded run: the same frames as a router's stream, shown at any moment of the run.

import { $, element, setText } from "./dom.js";

// Returns the recorded runs in a result of `tercet sim --record`; throws an error for another file.
export function runsOf(result) {
  const found = Object.entries(result?.timelines ?? {}).filter(([, frames]) => frames.length);
  if (!found.length) throw new Error("this file has no recorded run; record one with tercet sim --record SECONDS --result-filename FILE");
  return found.map(([name, frames]) => ({ name, frames }));
}

export class Player {
  constructor(state, onDraw) {
    this.state = state; this.onDraw = onDraw; this.playing = false; this.speed = 1; this.now = 0;
    $("play").addEventListener("click", () => this.toggle());
    $("time").addEventListener("input", () => { this.seek(Number($("time").value)); });
    $("speed").addEventListener("change", () => { this.speed = Number($("speed").value); });
    $("run").addEventListener("change", () => this.use(Number($("run").value)));
    document.addEventListener("keydown", (event) => {
      if (event.key === " " && this.frames && !event.target.closest("button, input, select, summary, dialog")) { event.preventDefault(); this.toggle(); }
    });
  }

  open(runs) {
    this.runs = runs;
    $("run").replaceChildren(...runs.map(({ name }, at) => element("option", { value: at }, name)));
    $("whichrun").hidden = runs.length < 2;
    $("player").hidden = false;
    this.use(0);
  }

  use(at) {
    this.frames = this.runs[at].frames;
    this.begin = 0; this.end = this.frames.at(-1).t;
    this.points = this.frames.flatMap((frame) => frame.points ?? []);
    $("time").max = this.end;
    const busy = this.end * 0.35;
    this.at = -1; this.seek(Number(new URLSearchParams(location.hash.slice(1)).get("t") ?? busy));
  }

  // Frames are replayed from the beginning when time goes back, since they contain only changes.
  seek(t) {
    this.now = Math.min(this.end, Math.max(this.begin, t));
    if (this.at < 0 || this.frames[this.at].t > this.now) { this.state.clear(); this.at = -1; }
    while (this.at + 1 < this.frames.length && this.frames[this.at + 1].t <= this.now) this.state.apply(this.frames[++this.at]);
    if (this.at < 0) this.state.apply(this.frames[this.at = 0]);
    // A lane may end between two frames, so the next frame's records of this moment are used already.
    $("time").value = this.now;
    setText($("clock"), `${this.now.toFixed(1)} of ${this.end.toFixed(1)} s`);
    this.onDraw();
  }

  toggle() {
    this.playing = !this.playing;
    if (this.playing && this.now >= this.end) this.seek(0);
    setText($("play"), this.playing ? "Pause" : "Play");
    $("play").setAttribute("aria-pressed", String(this.playing));
    this.last = performance.now();
    if (this.playing) requestAnimationFrame((time) => this.step(time));
  }

  step(time) {
    if (!this.playing) return;
    if (time - this.last > 50) { const passed = (time - this.last) / 1000; this.last = time; this.seek(this.now + passed * this.speed); }
    if (this.now >= this.end) this.toggle(); else requestAnimationFrame((next) => this.step(next));
  }
}
