// The state of the fleet, built from frames; nothing is drawn here. A frame has the changes since the previous one.

export const DEAD = 1, DRAINING = 2, STOPPING = 4, REFUSED = 8, SILENT = 16;
export const KV = 0, RUNNING = 1, WAITING = 2, STEP = 3, HERE = 4, TTFT = 5, STATE = 6;
const POINTS_KEPT = 3600, LANES_KEPT = 3000, MOVES_KEPT = 400;

export class FleetState {
  constructor() { this.past = []; this.clear(); }

  // The points of before the page was opened, then those of its frames. The router's point of the time in which the page
  // was opened covers its first frames.
  allPoints() {
    const [first] = this.points, begin = first ? first.t - first.seconds : Infinity;
    const before = this.past.filter((point) => point.t - point.seconds < begin), until = before.at(-1)?.t ?? -Infinity;
    return [...before, ...this.points.filter((point) => point.t > until)];
  }

  clear() {
    this.t = 0; this.about = null; this.engines = []; this.rows = []; this.unseen = []; this.points = [];
    this.lanes = new Map(); this.moves = new Map(); this.roster = (this.roster ?? 0) + 1; this.changed = new Set();
  }

  apply(frame) {
    if (frame.whole) this.clear();
    this.t = frame.t;
    if (frame.about) this.about = frame.about;
    if (frame.engines) {
      this.engines = frame.engines.map(([name, role]) => ({ name, role }));
      this.rows = this.engines.map(() => [0, 0, 0, 0, 0, 0, SILENT]);
      this.roster += 1;
    }
    for (const [index, ...row] of frame.loads ?? []) { this.rows[index] = row; this.changed.add(index); }
    this.unseen = frame.unseen ?? [];
    this.points.push(...(frame.points ?? []));
    for (const [lane, t, program, prompt, seq] of frame.lanes ?? [])
      this.lanes.set(lane, { lane, t, program, prompt, seq, spans: [], end: null });
    for (const [lane, verb, engine, begin, end, to, tokens, cached, bytes, chunks, said] of frame.spans ?? [])
      this.lanes.get(lane)?.spans.push({ verb, engine, begin, end, to, tokens, cached, bytes, chunks, said });
    for (const [lane, t, done, tokens, ttft, tpot] of frame.ends ?? []) {
      const found = this.lanes.get(lane);
      if (found) found.end = { t, done, tokens, ttft, tpot };
    }
    for (const move of frame.moves ?? []) this.moves.set(move.number, move);
    if (this.points.length > POINTS_KEPT) this.points.splice(0, this.points.length - POINTS_KEPT);
    for (const [kept, most] of [[this.lanes, LANES_KEPT], [this.moves, MOVES_KEPT]])
      for (const key of kept.keys()) { if (kept.size <= most) break; kept.delete(key); }
  }

  // Returns the most important state of an engine.
  stateOf(index) {
    const state = this.rows[index][STATE];
    if (state & DEAD) return "unreachable";
    if (state & REFUSED) return "refused";
    if (state & STOPPING) return "stopping";
    if (state & DRAINING) return "draining";
    return state & SILENT ? "no report" : "";
  }

  // Returns sums of the last `seconds` (requests, tokens and times), for all programs and by program.
  recent(seconds) {
    const since = this.t - seconds, all = emptySum(), programs = new Map();
    for (let i = this.points.length - 1; i >= 0 && this.points[i].t > since; i--) {
      const point = this.points[i];
      all.seconds += point.seconds; all.failed += point.failed ?? 0; all.refused += point.refused ?? 0;
      for (const [name, values] of Object.entries(point.programs)) {
        if (!programs.has(name)) programs.set(name, emptySum());
        addTo(programs.get(name), values); addTo(all, values);
      }
    }
    return { all, programs };
  }
}

export function emptySum() { return { seconds: 0, done: 0, unfinished: 0, failed: 0, refused: 0, tokens: 0, times: [[0, 0], [0, 0], [0, 0], [0, 0]] }; }

export function addTo(sum, [done, unfinished, tokens, ...times]) {
  sum.done += done; sum.unfinished += unfinished; sum.tokens += tokens;
  times.forEach((value, i) => { if (value !== null) { sum.times[i][0] += value * done; sum.times[i][1] += done; } });
}

// Means of short intervals' percentiles, weighted by requests: close to the true percentiles, and cheap.
export const timeOf = (sum, i) => (sum.times[i][1] ? sum.times[i][0] / sum.times[i][1] : null);
