// The router's stream, read by fetch, since an EventSource cannot send a key. It reconnects after every end.

const LONGEST_PAUSE_MS = 10000, SILENCE_MS = 15000;

export async function about() {
  const answer = await fetch("about", { cache: "no-store" });
  if (!answer.ok) throw new Error(`the page's server answers with ${answer.status}`);
  return answer.json();
}

// The last minutes, as points of the charts; none if the router does not tell.
export async function past(key) {
  const answer = await fetch("history", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  return answer.ok ? (await answer.json()).points : [];
}

export class Stream {
  constructor({ key, onFrame, onState, onRefused }) {
    Object.assign(this, { key, onFrame, onState, onRefused });
    this.stopped = false;
  }

  async run() {
    let pause = 500;
    while (!this.stopped) {
      try {
        this.onState("connecting");
        if (await this.once()) pause = 500;
      } catch (error) {
        if (error.refused) { this.onRefused(error.refused, error.message); return; }
        this.said = error.message;
      }
      if (this.stopped) return;
      this.onState("away", this.said);
      await new Promise((go) => { setTimeout(go, pause); });
      pause = Math.min(LONGEST_PAUSE_MS, pause * 2);
    }
  }

  stop() { this.stopped = true; this.aborting?.abort(); }

  async once() {
    this.aborting = new AbortController();
    const silence = () => setTimeout(() => this.aborting.abort(), SILENCE_MS);
    let timer = silence();
    try {
      const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
      const answer = await fetch("stream", { headers, cache: "no-store", signal: this.aborting.signal });
      if (!answer.ok) {
        const said = (await answer.json().catch(() => null))?.error?.message ?? `the router answers with ${answer.status}`;
        throw Object.assign(new Error(said), { refused: [401, 403].includes(answer.status) ? answer.status : 0 });
      }
      this.onState("live", answer.headers.get("x-tercet-view"));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        clearTimeout(timer);
        if (done) break;
        timer = silence();
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) if (event.startsWith("data: ")) this.onFrame(JSON.parse(event.slice(6)));
      }
      this.said = "the router closed the stream";
      return true;
    } finally { clearTimeout(timer); }
  }
}
