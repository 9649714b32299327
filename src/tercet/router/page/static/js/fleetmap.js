// The fleet map: engines by role as cards, tiles or dots, by their number. Each is a button that opens its engine.

import { $, element, setText, heat, ms } from "./dom.js";
import { KV, RUNNING, WAITING, STEP, TTFT } from "./state.js";

const CARDS = 24, TILES = 160;
const MARKS = { unreachable: "×", refused: "!", stopping: "▾", draining: "▾", "no report": "?" };
const COLUMN = { kv: KV, running: RUNNING, waiting: WAITING, step: STEP, ttft: TTFT };
export const ROLES = ["prefill", "decode", "both"];

export class FleetMap {
  constructor(onOpen) {
    this.onOpen = onOpen; this.cells = []; this.roster = -1; this.metric = "kv"; this.top = 0;
    $("metric").addEventListener("change", () => { this.metric = $("metric").value; this.all = true; this.redraw?.(); });
    $("map").addEventListener("keydown", (event) => this.walk(event));
  }

  draw(state) {
    this.redraw = () => this.draw(state);
    if (this.roster !== state.roster) this.build(state);
    const top = this.scale(state), all = this.all || top !== this.top;
    this.top = top;
    for (const index of all ? this.cells.keys() : state.changed) if (this.cells[index]) this.fill(state, index);
    this.all = false;
    state.changed.clear();
    $("unseen").hidden = !state.unseen.length;
    setText($("unseen"), state.unseen.map((more) => `and ${more.engines} more ${more.role}: KV ${(more.kv / 10).toFixed(0)}%, ${more.running} running, ${more.waiting} waiting, ${more.dead} unreachable`).join("; "));
  }

  recolor() { this.all = true; this.shown = null; }

  build(state) {
    this.roster = state.roster; this.all = true;
    const size = state.engines.length;
    this.kind = size <= CARDS ? "card" : size <= TILES ? "tile" : "dot";
    this.cells = new Array(size);
    $("busy-key").hidden = this.kind !== "dot";
    const groups = ROLES.map((role) => {
      const cells = element("div", { class: `cells ${this.kind}s`, role: "group" });
      const members = state.engines.map((engine, index) => ({ ...engine, index })).filter((engine) => engine.role === role);
      for (const engine of members) cells.append(this.cells[engine.index] = this.cell(engine));
      cells.setAttribute("aria-label", `${role} engines`);
      if (!members.length) return "";
      const group = element("div", { class: "role" }, element("h3", {}, `${role} · ${members.length}`), cells);
      group.style.flexGrow = members.length;
      return group;
    });
    $("map").replaceChildren(...groups);
    if (!size) $("map").append(element("p", { class: "note" }, "No engines yet."));
    const first = $("map").querySelector("button");
    if (first) first.tabIndex = 0;
  }

  cell(engine) {
    const cell = element("button", { type: "button", class: `cell ${this.kind}`, tabIndex: -1, onclick: () => this.onOpen(engine.name) });
    cell.parts = {};
    if (this.kind === "dot") return cell;
    const parts = cell.parts = { mark: element("em"), bar: element("i"), line: element("small"), second: element("small") };
    const bar = element("span", { class: "bar" }, parts.bar);
    if (this.kind === "card") cell.append(element("b", {}, engine.name, parts.mark), bar, parts.line, parts.second);
    else cell.append(parts.mark, engine.name, bar);
    return cell;
  }

  fill(state, index) {
    const row = state.rows[index], cell = this.cells[index], engine = state.engines[index], said = state.stateOf(index);
    const { fill, ink } = heat(row[COLUMN[this.metric]] / this.top);
    const down = said === "unreachable" || said === "refused";
    const unknown = !row[COLUMN[this.metric]] && (this.metric === "ttft" || this.metric === "step");
    cell.style.setProperty("--heat", down ? "transparent" : unknown ? "var(--track)" : fill);
    cell.style.setProperty("--heat-ink", down ? "var(--bad)" : unknown ? "var(--ink)" : ink);
    cell.classList.toggle("dead", down);
    cell.classList.toggle("busy", this.kind === "dot" && !down && row[RUNNING] > 0);
    cell.classList.toggle("draining", said === "draining" || said === "stopping");
    const facts = `KV ${Math.round(row[KV] / 10)}%, ${row[RUNNING]} running, ${row[WAITING]} waiting, step ${ms(row[STEP] / 1000 || null)}, TTFT ${ms(row[TTFT] || null)}`;
    cell.title = `${engine.name}: ${said ? `${said}, ` : ""}${facts}`;
    cell.setAttribute("aria-label", cell.title);
    const { mark, bar, line, second } = cell.parts;
    if (this.kind === "dot") { setText(cell, MARKS[said] ?? ""); return; }
    bar.style.width = `${Math.min(100, row[KV] / 10)}%`;
    if (this.kind === "tile") { setText(mark, said ? MARKS[said] : row[WAITING] ? `${row[WAITING]} q` : ""); return; }
    setText(mark, said);
    setText(line, `KV ${Math.round(row[KV] / 10)}% · ${row[RUNNING]} running · ${row[WAITING]} queued`);
    setText(second, `step ${ms(row[STEP] / 1000 || null)} · TTFT ${ms(row[TTFT] || null)}`);
  }

  // The upper end of the colour scale: a round number, so that small changes of the load do not change colours.
  scale(state) {
    if (this.metric === "kv") { this.legend("0", "100%"); return 1000; }
    let most = 0;
    for (const row of state.rows) most = Math.max(most, row[COLUMN[this.metric]]);
    const unit = this.metric === "step" ? 1000 : 1;
    const top = unit * 2 ** Math.ceil(Math.log2(Math.max(4, most / unit)));
    this.legend("0", this.metric === "waiting" || this.metric === "running" ? String(top) : ms(top / unit));
    return top;
  }

  legend(low, high) {
    const key = `${low} ${high}`;
    if (this.shown === key) return;
    this.shown = key;
    const bar = element("i");
    bar.style.background = `linear-gradient(90deg, ${[0, 0.2, 0.4, 0.6, 0.8, 1].map((at) => heat(at).fill).join(",")})`;
    $("scale").replaceChildren(low, bar, high);
  }

  // Arrow keys go from engine to engine: one stop of the tab key is enough for a thousand of them.
  walk(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up", Home: "home", End: "end" };
    const step = steps[event.key], cells = [...$("map").querySelectorAll("button")], at = cells.indexOf(document.activeElement);
    if (step === undefined || at < 0) return;
    event.preventDefault();
    let to = at + (typeof step === "number" ? step : 0);
    if (step === "home") to = 0;
    if (step === "end") to = cells.length - 1;
    if (step === "down" || step === "up") {
      const here = cells[at].getBoundingClientRect(), sign = step === "down" ? 1 : -1;
      for (to = at + sign; cells[to]; to += sign) {
        const there = cells[to].getBoundingClientRect();
        if ((there.top - here.top) * sign > 2 && (there.left - here.left) * sign >= -2) break;
      }
    }
    if (!cells[to]) return;
    cells[at].tabIndex = -1; cells[to].tabIndex = 0; cells[to].focus();
  }
}
