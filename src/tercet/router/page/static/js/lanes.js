// Requests as lanes of time. A request has one row for each engine that it touches; arrows show KV and moves.

import { $, element, setText, prepared, color, ms, bytes, count } from "./dom.js";

const ROW = 13, HEAD = 15, GAP = 7, TOP = 20, HIGHEST = 460;
export const VERBS = [["prep", "prep_recv"], ["prefill", "prefill"], ["send", "remote_send"], ["decode", "decode"], ["move", "move"], ["wait", "waiting"]];

// Returns the bars of a request until `now`: its verbs on each engine.
export function barsOf(lane, now) {
  const bars = [], arrows = [], marks = [], rows = [], spans = lane.spans;
  const row = (engine) => { let at = rows.indexOf(engine); if (at < 0) at = rows.push(engine) - 1; return at; };
  const over = lane.end?.t ?? now;
  let decode = null, until = lane.t;
  const stop = (t) => { if (decode) bars.push({ ...decode, end: Math.max(decode.begin, t) }); decode = null; };
  for (const span of spans) {
    if (span.verb === "retry" || span.verb === "fallback") {
      stop(span.end);
      marks.push({ row: span.engine ? row(span.engine) : 0, t: span.end, said: `${span.verb}: ${span.said}` });
    } else if (span.verb === "move") {
      const from = row(span.engine), to = row(span.to), moved = span.said.includes("moved");
      bars.push({ kind: "move", row: from, begin: span.begin, end: span.end, span });
      if (moved) { arrows.push({ kind: "move", from, to, begin: span.begin, end: span.end, span }); stop(span.end); decode = { kind: "decode", row: to, begin: span.end, engine: span.to }; }
      else marks.push({ row: from, t: span.end, said: `move ${span.said}` });
    } else if (span.verb === "start_generate") {
      stop(span.begin);
      bars.push({ kind: "prefill", row: row(span.engine), begin: span.begin, end: span.end, span });
      decode = { kind: "decode", row: row(span.engine), begin: span.end, engine: span.engine };
    } else {
      const kind = span.verb === "remote_send" ? "send" : "prep", at = row(span.engine);
      if (!(decode && span.begin >= decode.begin)) bars.push({ kind, row: at, begin: span.begin, end: span.end, span });
      if (kind === "send" && span.to) arrows.push({ kind, from: at, to: row(span.to), begin: span.begin, end: span.end, span });
    }
    until = Math.max(until, span.end);
  }
  stop(over);
  if (!spans.length || (!decode && until < over && !bars.some((bar) => bar.kind === "decode" && bar.end >= over - 1e-6)))
    bars.unshift({ kind: "wait", row: 0, begin: until, end: over });
  return { rows: rows.length ? rows : [""], bars, arrows, marks };
}

// Numbers of other workers' lanes begin at multiples of ten million.
function nameOf({ lane }) { return lane < 1e7 ? String(lane) : `${lane % 1e7}·${Math.floor(lane / 1e7)}`; }

function sizeOf(parts) { return HEAD + parts.rows.length * ROW + GAP; }

export class Lanes {
  constructor() {
    this.seconds = 8; this.every = 1;
    $("window").addEventListener("change", () => this.redraw?.());
    $("verbs").replaceChildren(...VERBS.map(([kind, name]) => {
      const swatch = element("i"); swatch.style.background = `var(--${kind})`;
      return element("span", {}, swatch, name);
    }));
    const canvas = $("lanes");
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.say(""));
    canvas.addEventListener("keydown", (event) => this.step(event));
    this.hits = []; this.chosen = -1;
  }

  draw(state, now) {
    this.redraw = () => this.draw(state, now);
    this.seconds = $("window").value === "auto" ? this.fitting(state) : Number($("window").value);
    const canvas = $("lanes"), from = now - this.seconds, room = canvas.clientWidth;
    if (!room) return;
    const alive = [...state.lanes.values()].reverse().filter((lane) => lane.t <= now && !(lane.end && lane.end.t < from));
    const shown = [];
    let height = TOP;
    for (const lane of this.chosenOf(alive, now)) {
      const parts = barsOf(lane, now), size = sizeOf(parts);
      if (height + size > HIGHEST) break;
      shown.push({ lane, parts, top: height, size });
      height += size;
    }
    setText($("lane-share"), alive.length > shown.length ? `${shown.length} of ${alive.length} in this window` : "");
    const { pen, width } = prepared(canvas, Math.max(height, 90));
    const label = width < 480 ? 70 : 104, x = (t) => label + ((t - from) / this.seconds) * (width - label - 6);
    this.hits = [];
    this.axis(pen, from, now, x, height);
    if (!shown.length) { pen.fillStyle = color("soft"); pen.fillText("No request in this window.", label + 8, TOP + 28); }
    for (const each of shown) this.lane(pen, each, from, now, x, label, width);
    canvas.setAttribute("aria-label", `Requests as lanes of time: ${shown.length} of the last ${this.seconds} seconds; arrow keys select one after the other`);
  }

  // If not all lanes fit, every second or third one and so on is drawn. The lane's number decides, so a lane that is
  // drawn stays until it leaves the window.
  chosenOf(lanes, now) {
    const sizes = new Map(lanes.map((lane) => [lane, sizeOf(barsOf(lane, now))]));
    const fits = (kept, room) => kept.reduce((sum, lane) => sum + sizes.get(lane), TOP) <= room;
    const thinned = (every) => lanes.filter((lane) => lane.lane % every === 0);
    if (this.every > 1 && fits(thinned(this.every / 2), HIGHEST * 0.9)) this.every /= 2;
    while (!fits(thinned(this.every), HIGHEST) && this.every < 64) this.every *= 2;
    return thinned(this.every);
  }

  // A window as long as some of the last requests; it stays unchanged while it fits, so that it does not jump.
  fitting(state) {
    const lives = [...state.lanes.values()].slice(-24).map((lane) => (lane.end?.t ?? state.t) - lane.t).sort((a, b) => a - b);
    const wanted = 1.8 * (lives[Math.floor(lives.length * 0.75)] ?? 4);
    if (wanted <= this.seconds && wanted > this.seconds / 2.2) return this.seconds;
    return [1, 2, 3, 4, 6, 8, 11, 15, 30, 60, 120].find((seconds) => seconds >= wanted) ?? 300;
  }

  axis(pen, from, now, x, height) {
    const fewest = this.seconds / (x(now) - x(from) < 380 ? 2 : 5);
    const every = [0.2, 0.5, 1, 2, 5, 10, 15, 30].find((seconds) => seconds >= fewest) ?? 60;
    pen.textBaseline = "alphabetic";
    for (let t = Math.ceil(from / every) * every; t <= now; t += every) {
      const at = Math.round(x(t)) + 0.5;
      pen.strokeStyle = color("line"); pen.beginPath(); pen.moveTo(at, 15); pen.lineTo(at, height); pen.stroke();
      pen.fillStyle = color("soft");
      const text = this.clock(t, every < 1);
      pen.textAlign = "center"; pen.fillText(text, Math.min(at, x(now) - pen.measureText(text).width / 2), 11);
    }
    pen.textAlign = "left";
  }

  clock(t, tenths = false) {
    if (t <= 1e8) return `${Number(t.toFixed(2))} s`;
    return new Date(t * 1000).toTimeString().slice(0, 8) + (tenths ? `.${Math.floor(t * 10 + 1e-6) % 10}` : "");
  }

  lane(pen, { lane, parts, top, size }, from, now, x, label, width) {
    const end = lane.end, left = x(from);
    pen.fillStyle = color("ink"); pen.font = '600 11.5px system-ui, "DejaVu Sans", sans-serif';
    const head = `#${nameOf(lane)} ${lane.program}`;
    pen.fillText(head, 2, top + 11, width / 2);
    const after = Math.min(width / 2, pen.measureText(head).width) + 12;
    pen.font = '11.5px system-ui, "DejaVu Sans", sans-serif'; pen.fillStyle = end && !end.done ? color("bad") : color("soft");
    pen.fillText(`${count(lane.prompt)} in${end ? ` · ${count(end.tokens)} out · ${end.done ? `TTFT ${ms(end.ttft)}` : "unfinished"}` : ""}`, after, top + 11, Math.max(10, width - after - 4));
    const y = (row) => top + HEAD + row * ROW;
    pen.save();
    pen.fillStyle = color("soft");
    parts.rows.forEach((name, row) => pen.fillText(shortened(pen, name, label - 8), 2, y(row) + 9.5));
    pen.beginPath(); pen.rect(label, top, width - label, size); pen.clip();
    for (const bar of parts.bars) {
      if (bar.end < from) continue;
      const a = Math.max(left, x(bar.begin)), b = Math.max(a + 1.5, x(Math.min(bar.end, now)));
      const thin = bar.kind === "move", line = y(bar.row) + (thin ? 8 : 1);
      pen.fillStyle = color(bar.kind);
      if (bar.kind === "wait") pen.globalAlpha = 0.55;
      pen.fillRect(a, line, b - a, thin ? 3 : ROW - 3); pen.globalAlpha = 1;
      if (bar.kind === "send" && bar.span.chunks > 1 && b - a > 10) this.layers(pen, bar, a, b, line);
      this.hits.push({ x0: a, x1: b, y0: y(bar.row), y1: y(bar.row) + ROW, said: this.words(lane, bar) });
    }
    for (const arrow of parts.arrows) if (arrow.end >= from) this.arrow(pen, arrow, x, y);
    // A row that began before the window is marked at its edge; one that has ended before it says so.
    parts.rows.forEach((_, row) => {
      const bars = parts.bars.filter((bar) => bar.row === row), middle = y(row) + ROW / 2 - 0.5;
      if (!bars.some((bar) => bar.begin < from)) return;
      pen.fillStyle = color("ink"); pen.beginPath(); pen.moveTo(left, middle); pen.lineTo(left + 6, middle - 5); pen.lineTo(left + 6, middle + 5); pen.fill();
      if (bars.every((bar) => bar.end < from)) {
        pen.fillStyle = color("panel"); pen.fillRect(left + 8, y(row), pen.measureText("earlier").width + 4, ROW);
        pen.fillStyle = color("soft"); pen.fillText("earlier", left + 10, y(row) + 9.5);
      }
    });
    for (const mark of parts.marks) {
      if (mark.t < from) continue;
      const at = x(mark.t), middle = y(mark.row) + ROW / 2 - 0.5;
      pen.strokeStyle = color("bad"); pen.lineWidth = 2.2; pen.beginPath();
      pen.moveTo(at - 4, middle - 4); pen.lineTo(at + 4, middle + 4); pen.moveTo(at + 4, middle - 4); pen.lineTo(at - 4, middle + 4);
      pen.stroke(); pen.lineWidth = 1;
      this.hits.push({ x0: at - 5, x1: at + 5, y0: middle - 6, y1: middle + 6, said: `#${nameOf(lane)}: ${mark.said}` });
    }
    pen.restore();
  }

  // KV is sent layer by layer: one notch for each chunk, or fewer if notches would touch.
  layers(pen, bar, a, b, line) {
    const portions = Math.min(bar.span.chunks, Math.floor((b - a) / 4));
    pen.fillStyle = color("panel");
    for (let i = 1; i < portions; i++) pen.fillRect(a + ((b - a) * i) / portions, line, 1, ROW - 3);
  }

  arrow(pen, { kind, from, to, begin, end }, x, y) {
    const x0 = kind === "move" ? x(begin) : x(end), x1 = x(end), y0 = y(from) + ROW / 2, y1 = y(to) + ROW / 2, down = y1 > y0 ? 1 : -1;
    pen.strokeStyle = pen.fillStyle = color(kind); pen.lineWidth = kind === "move" ? 2 : 1.3;
    pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1 - down * 3); pen.stroke();
    pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x1 - 4, y1 - down * 7); pen.lineTo(x1 + 4, y1 - down * 7); pen.fill();
    pen.lineWidth = 1;
  }

  words(lane, bar) {
    const long = ms((bar.end - bar.begin) * 1000), who = `#${nameOf(lane)}${lane.seq ? ` (${lane.seq})` : ""}`;
    if (bar.kind === "decode") return `${who}: decode on ${bar.engine}, ${long}`;
    if (bar.kind === "wait") return `${who}: waits, ${long}`;
    const s = bar.span, name = bar.kind === "prefill" ? "start_generate, until its first token," : s.verb;
    const more = [s.tokens && `${s.tokens} tokens`, s.cached && `${s.cached} cached`, s.bytes && bytes(s.bytes), s.chunks > 1 && `${s.chunks} chunks`, s.said];
    return `${who}: ${name} on ${s.engine}${s.to ? ` → ${s.to}` : ""}, ${[long, ...more].filter(Boolean).join(", ")}`;
  }

  point(event) {
    const box = $("lanes").getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const hit = this.hits.findLast((each) => px >= each.x0 - 2 && px <= each.x1 + 2 && py >= each.y0 && py <= each.y1);
    this.say(hit ? hit.said : "");
  }

  step(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by || !this.hits.length) return;
    event.preventDefault();
    this.chosen = (this.chosen + by + this.hits.length) % this.hits.length;
    this.say(this.hits[this.chosen].said);
  }

  say(text) { $("lane-said").hidden = false; setText($("lane-said"), text || " "); }

  table(state, now) {
    if (!$("lane-table").closest("details").open) return;
    const rows = [...state.lanes.values()].filter((lane) => lane.t <= now).slice(-20).reverse().map((lane) => {
      const way = lane.spans.map((s) => `${s.verb} ${s.engine}${s.to ? `→${s.to}` : ""} ${ms((s.end - s.begin) * 1000)}`).join(", ");
      const end = lane.end;
      return element("tr", {}, ...[`#${nameOf(lane)} ${lane.seq}`, lane.program, way || "waits"].map((text) => element("td", {}, text)),
        ...[ms(end?.ttft), ms(end?.tpot), end ? count(end.tokens) : "…"].map((text) => element("td", { class: "n" }, text)));
    });
    $("lane-table").replaceChildren(...rows);
  }
}

function shortened(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`…${text.slice(text.length - end)}`).width > room) end -= 1;
  return `…${text.slice(text.length - end)}`;
}
