// Charts of programs over time; each program has its own colour and its own dash, for viewers who see few colours.

import { $, element, setText, prepared, color, ms, count } from "./dom.js";
import { emptySum, addTo, timeOf } from "./state.js";

const BINS = 90, HEIGHT = 150, PAD = { left: 52, right: 8, top: 8, bottom: 20 };
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 2]];
const CHARTS = [
  { id: "ttft", title: "TTFT", unit: "ms, p50; thin: p90", lines: [(s) => timeOf(s, 0), (s) => timeOf(s, 1)], show: ms, objective: "ttft_objective" },
  { id: "tpot", title: "TPOT", unit: "ms, p50; thin: p90", lines: [(s) => timeOf(s, 2), (s) => timeOf(s, 3)], show: ms, objective: "tpot_objective" },
  { id: "tokens", title: "Output tokens", unit: "per second", lines: [(s) => (s.seconds > 0.02 ? s.tokens / s.seconds : null)], show: count },
  { id: "done", title: "Requests done", unit: "per second", lines: [(s) => (s.seconds > 0.02 ? s.done / s.seconds : null)], show: count },
];

export class ProgramStyles {
  constructor() { this.names = []; }
  of(name) {
    if (!this.names.includes(name)) this.names.push(name);
    const at = this.names.indexOf(name);
    return { color: `p${at % 6}`, dash: DASHES[Math.floor(at / 6 + at) % DASHES.length] };
  }
}

export class Charts {
  constructor(styles) {
    this.styles = styles;
    $("span").addEventListener("change", () => this.redraw?.());
    $("chart-grid").replaceChildren(...CHARTS.map((chart) => {
      chart.canvas = element("canvas", { role: "img", onpointermove: (event) => this.point(chart, event), onpointerleave: () => { this.at = null; this.redraw?.(); } });
      chart.said = element("span");
      return element("figure", {}, element("figcaption", {}, element("b", {}, chart.title), ` ${chart.unit} `, chart.said), chart.canvas);
    }));
  }

  // `whole`: start and end of a recorded run, whose charts do not scroll.
  draw(state, now, whole = null, all = state.allPoints()) {
    this.redraw = () => this.draw(state, now, whole, all);
    const [from, to] = whole ?? [now - Number($("span").value), now];
    const first = all.length ? Math.max(from, all[0].t - all[0].seconds) : from;
    const start = whole ? from : Math.min(first, now - 20), bins = this.bins(all, start, to);
    const names = [...new Set(bins.flatMap((bin) => [...bin.keys()]))].sort();
    for (const chart of CHARTS) this.chart(chart, bins, names, start, to, state, whole ? now : null);
    this.legend(names);
    $("span-label").hidden = Boolean(whole);
    $("objective-key").hidden = !(state.about?.ttft_objective || state.about?.tpot_objective);
  }

  bins(points, from, to) {
    const bins = Array.from({ length: BINS }, () => new Map()), width = (to - from) / BINS || 1;
    for (const point of points) {
      const end = Math.floor((point.t - from) / width);
      if (end < 0 || (end >= BINS && point.t !== to)) continue;
      // A point of the router's history is longer than a bin of a short chart: it counts in each bin that it covers.
      const last = Math.min(BINS - 1, end), first = Math.min(last, Math.floor((point.t - point.seconds - from) / width) + 1);
      for (const bin of bins.slice(Math.max(0, first), last + 1)) {
        for (const [name, values] of Object.entries(point.programs)) {
          if (!bin.has(name)) bin.set(name, emptySum());
          addTo(bin.get(name), values);
        }
        bin.seconds = (bin.seconds ?? 0) + point.seconds;
      }
    }
    for (const bin of bins) for (const sum of bin.values()) sum.seconds = bin.seconds;
    return bins;
  }

  chart(chart, bins, names, from, to, state, cursor) {
    const made = prepared(chart.canvas, HEIGHT);
    if (!made) return;
    const { pen, width } = made, objective = state.about?.[chart.objective];
    const values = names.flatMap((name) => bins.flatMap((bin) => (bin.has(name) ? chart.lines.map((line) => line(bin.get(name))) : [])));
    const most = Math.max(0, objective ? objective * 1.15 : 0, ...values.filter((value) => value !== null)), top = rounded(most || 1);
    const x = (at) => PAD.left + (at / (BINS - 1)) * (width - PAD.left - PAD.right);
    const y = (value) => HEIGHT - PAD.bottom - (value / top) * (HEIGHT - PAD.top - PAD.bottom);
    pen.textBaseline = "middle"; pen.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      pen.strokeStyle = color("line"); pen.beginPath(); pen.moveTo(PAD.left, y(top * share) + 0.5); pen.lineTo(width - PAD.right, y(top * share) + 0.5); pen.stroke();
      pen.fillStyle = color("soft"); pen.fillText(!share ? "0" : most ? chart.show(top * share) : "", PAD.left - 5, y(top * share));
    }
    pen.textBaseline = "alphabetic"; pen.textAlign = "left";
    const live = from > 1e8, words = live ? [`−${ago(to - from)}`, "now"] : [`${from.toFixed(0)} s`, `${to.toFixed(1)} s`];
    pen.fillText(words[0], PAD.left, HEIGHT - 5); pen.textAlign = "right"; pen.fillText(words[1], width - PAD.right, HEIGHT - 5);
    if (objective) { pen.strokeStyle = color("bad"); pen.setLineDash([3, 3]); pen.beginPath(); pen.moveTo(PAD.left, y(objective)); pen.lineTo(width - PAD.right, y(objective)); pen.stroke(); pen.setLineDash([]); pen.fillStyle = color("bad"); pen.fillText("objective", width - PAD.right, y(objective) - 4); }
    pen.textAlign = "left";
    for (const name of names) chart.lines.forEach((line, thin) => {
      const style = this.styles.of(name);
      pen.strokeStyle = color(style.color); pen.lineWidth = thin ? 1 : 2.2; pen.globalAlpha = thin ? 0.75 : 1; pen.setLineDash(style.dash); pen.lineJoin = "round";
      pen.beginPath();
      let last = -9;
      bins.forEach((bin, at) => {
        const value = bin.has(name) ? line(bin.get(name)) : null;
        if (value === null) return;
        if (at - last > 6) pen.moveTo(x(at) - 1, y(value));
        pen.lineTo(x(at), y(value)); last = at;
      });
      pen.stroke();
    });
    pen.setLineDash([]); pen.globalAlpha = 1; pen.lineWidth = 1;
    const at = this.at ?? (cursor === null ? null : ((cursor - from) / (to - from)) * (BINS - 1));
    if (at !== null) { pen.strokeStyle = color("ink"); pen.beginPath(); pen.moveTo(x(at), PAD.top); pen.lineTo(x(at), HEIGHT - PAD.bottom); pen.stroke(); }
    this.say(chart, bins, names, at);
  }

  say(chart, bins, names, at) {
    const index = at === null ? BINS - 1 : Math.round(at), near = [index, index - 1, index + 1, index - 2];
    const said = names.map((name) => {
      const bin = near.map((i) => bins[i]).find((found) => found?.has(name) && chart.lines[0](found.get(name)) !== null);
      return bin ? `${names.length > 1 ? `${name} ` : ""}${chart.show(chart.lines[0](bin.get(name)))}` : "";
    }).filter(Boolean).join(" · ");
    setText(chart.said, said ? `· ${said}` : "");
    chart.canvas.setAttribute("aria-label", `${chart.title}, ${chart.unit}: ${said || "no values"}`);
  }

  point(chart, event) {
    const box = chart.canvas.getBoundingClientRect();
    this.at = Math.min(BINS - 1, Math.max(0, ((event.clientX - box.left - PAD.left) / (box.width - PAD.left - PAD.right)) * (BINS - 1)));
    this.redraw?.();
  }

  legend(names) {
    const key = names.join("\n");
    if (this.shown === key) return;
    this.shown = key;
    $("program-legend").replaceChildren(...names.map((name) => {
      const style = this.styles.of(name), line = element("i", { class: "line" });
      line.style.borderTopColor = `var(--${style.color})`;
      line.style.borderTopStyle = style.dash.length ? (style.dash[0] > 3 ? "dashed" : "dotted") : "solid";
      return element("span", {}, line, name);
    }));
  }
}

function ago(seconds) {
  return seconds < 120 ? `${Math.round(seconds)} s` : `${Number((seconds / 60).toFixed(1))} min`;
}

function rounded(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * size).find((step) => step >= value * 0.999);
}
