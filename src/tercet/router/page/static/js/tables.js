// The tables and texts: the present fleet, its slowest engines, programs and moves.

import { $, element, setText, ms, count, bytes, NONE } from "./dom.js";
import { DEAD, DRAINING, STOPPING, REFUSED, KV, RUNNING, WAITING, STEP, TTFT, STATE, timeOf } from "./state.js";

const RECENT = 10, SLOWEST = 8, MOVES = 30;

export class Numbers {
  constructor() {
    const names = ["engines", "running", "waiting", "tokens", "requests", "failures", "refusals", "TTFT", "TTFT p90", "TPOT"];
    this.shown = names.map((name) => ({ name: element("span", {}, name), value: element("b", {}, NONE) }));
    $("numbers").replaceChildren(...this.shown.map(({ name, value }) => element("div", { class: "number" }, value, name)));
  }

  draw(state) {
    const { all } = state.recent(RECENT), rows = state.rows;
    const unseen = (field) => state.unseen.reduce((sum, more) => sum + more[field], 0);
    const sum = (column) => rows.reduce((total, row) => total + row[column], 0);
    const dead = rows.filter((row) => row[STATE] & (DEAD | REFUSED)).length + unseen("dead");
    const leaving = rows.filter((row) => row[STATE] & (DRAINING | STOPPING)).length, size = rows.length + unseen("engines");
    const rate = (value) => (all.seconds ? (value && value / all.seconds < 0.1 ? "<0.1" : count(value / all.seconds)) : NONE);
    const { ttft_objective: wanted, tpot_objective: wantedGap } = state.about ?? {};
    const time = (i, name, most) => [ms(timeOf(all, i)), name, Boolean(most) && timeOf(all, i) > most, most ? `red above the objective of ${ms(most)}` : ""];
    const values = [
      [dead ? `${size - dead} of ${size}` : String(size), `engines${dead ? `, ${dead} unreachable` : ""}${leaving ? `, ${leaving} draining` : ""}`, dead],
      [count(sum(RUNNING) + unseen("running")), "running"], [count(sum(WAITING) + unseen("waiting")), "waiting"],
      [rate(all.tokens), "tokens/s"], [rate(all.done), "requests/s"],
      [rate(all.failed), "failures/s", all.failed, "requests that the router could not serve"], [rate(all.refused), "refusals/s", all.refused, "requests that the router did not admit"],
      time(0, "TTFT p50", wanted), time(1, "TTFT p90", wanted), time(2, "TPOT p50", wantedGap),
    ];
    values.forEach(([value, name, bad, title], i) => {
      this.shown[i].value.parentNode.title = title ?? "";
      setText(this.shown[i].value, value); setText(this.shown[i].name, name);
      this.shown[i].value.parentNode.dataset.is = bad ? "bad" : "";
    });
  }
}

export class Slowest {
  constructor(onOpen) { this.onOpen = onOpen; }

  draw(state) {
    const order = state.rows.map((row, index) => ({ row, index }))
      .filter(({ row }) => row[TTFT] || row[WAITING] || row[STATE] & DEAD)
      .sort((a, b) => (b.row[TTFT] - a.row[TTFT]) || (b.row[WAITING] - a.row[WAITING])).slice(0, SLOWEST);
    const wanted = state.about?.ttft_objective, middle = median(state.rows.map((row) => row[TTFT]).filter(Boolean));
    setText($("slow-key"), `; red: ${wanted ? `above the objective of ${ms(wanted)}` : "more than twice the median"}`);
    if (!order.length) { $("slowest").replaceChildren(element("tr", {}, element("td", { class: "empty", colSpan: 6 }, "No request yet."))); return; }
    // Rows stay, so that a click or the focus is never lost to a redraw.
    const rows = $("slowest").rows;
    while (rows.length > order.length || (rows.length && !rows[0].cells[5])) rows[0].remove();
    while (rows.length < order.length) $("slowest").append(this.row());
    order.forEach(({ row, index }, i) => {
      const { name, role } = state.engines[index], cells = rows[i].cells;
      cells[0].firstChild.onclick = () => this.onOpen(name);
      setText(cells[0].firstChild, name);
      const said = [role, ms(row[TTFT] || null), String(row[WAITING]), `${Math.round(row[KV] / 10)}%`, ms(row[STEP] / 1000 || null)];
      said.forEach((text, at) => setText(cells[at + 1], text));
      cells[2].className = (wanted ? row[TTFT] > wanted : row[TTFT] > 2 * middle && row[TTFT] > 20) ? "n bad" : "n";
    });
  }

  row() {
    const numbers = Array.from({ length: 4 }, () => element("td", { class: "n" }));
    return element("tr", {}, element("td", {}, element("button", { type: "button" })), element("td"), ...numbers);
  }
}

function median(values) {
  return values.length ? values.sort((a, b) => a - b)[Math.floor(values.length / 2)] : 0;
}

export class Programs {
  constructor(styles) { this.styles = styles; }

  draw(state) {
    const about = state.about, { programs } = state.recent(60);
    if (!about) return;
    const total = about.shares.reduce((sum, share) => sum + share.weight, 0), shares = new Map(about.shares.map((share) => [share.name, share.weight / total]));
    const key = JSON.stringify([about.shares, [...shares]]);
    if (this.shown !== key) {
      this.shown = key;
      $("split").replaceChildren(...about.shares.filter((share) => share.weight).map((share) => {
        const part = element("i", {}, `${share.name} ${Math.round((100 * share.weight) / total)}%`);
        part.style.flexGrow = share.weight; part.style.flexBasis = 0; part.style.background = `var(--${this.styles.of(share.name).color})`;
        return part;
      }));
      $("split").setAttribute("aria-label", `Split: ${[...shares].map(([name, share]) => `${name} ${Math.round(100 * share)}%`).join(", ")}`);
    }
    const names = [...new Set([...shares.keys(), ...programs.keys()])];
    $("program-table").replaceChildren(...names.map((name) => {
      const sum = programs.get(name), share = shares.get(name);
      const said = [share === undefined ? NONE : `${Math.round(100 * share)}%`, count(sum?.done ?? 0), count(sum?.unfinished ?? 0), ...[0, 1, 2].map((i) => ms(sum ? timeOf(sum, i) : null))];
      return element("tr", {}, element("td", {}, name), ...said.map((text, i) => element("td", { class: i === 2 && sum?.unfinished ? "n bad" : "n" }, text)));
    }));
    const notes = [`version ${about.version}, last 60 s`, about.rules && `${about.rules} rules for headers or models`, about.sticky && `sticky by ${about.sticky}`, about.returned && `returned: ${about.returned}`];
    setText($("program-note"), notes.filter(Boolean).join(" · "));
  }
}

export function drawMoves(state, clock) {
  const moves = [...state.moves.values()].filter((move) => move.t <= state.t + 1).sort((a, b) => b.t - a.t);
  setText($("move-count"), moves.length ? `${moves.filter((move) => move.outcome === "moved").length} of the last ${moves.length} moved` : "");
  const rows = moves.slice(0, MOVES).map((move) => {
    const bad = move.outcome === "failed" || move.outcome === "dropped";
    return element("tr", { title: [move.seq_id, move.error].filter(Boolean).join(": ") },
      element("td", { class: "n" }, clock(move.t)), element("td", { class: "way" }, element("span", {}, `${move.source} →`), " ", element("span", {}, move.to)), element("td", {}, move.reason),
      element("td", { class: bad ? "bad" : "" }, move.outcome.replace("_", " ")), element("td", { class: "n" }, bytes(move.bytes ?? 0)),
      element("td", { class: "n" }, move.pause === undefined || move.pause === null ? NONE : ms(move.pause * 1000)));
  });
  $("move-table").replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { class: "empty", colSpan: 6 }, "No sequence has moved."))]));
}
