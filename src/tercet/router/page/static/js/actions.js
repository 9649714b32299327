// Changes of the fleet by the router's admin routes: each asks for confirmation first, and then shows its result.

import { $, element, setText, ms, long } from "./dom.js";
import { KV, RUNNING, WAITING, STEP, HERE, TTFT } from "./state.js";

const BUILT_IN = ["data_parallel", "disaggregated", "balanced", "conditional", "auto"];

export class Actions {
  constructor({ key, notice }) {
    this.key = key; this.notice = notice; this.why = "the stream is not open yet"; this.name = null;
    $("drain").addEventListener("click", () => this.drain());
    $("set-role").addEventListener("click", () => this.setRole());
    $("switch").addEventListener("click", () => this.openSwitch());
    $("switch-go").addEventListener("click", () => this.switchPrograms());
    $("switch-add").addEventListener("change", () => this.addShare());
  }

  // An empty `why` allows changes.
  allow(why) {
    this.why = why;
    for (const id of ["drain", "set-role", "switch", "role"]) { $(id).disabled = Boolean(why); $(id).title = why; }
    setText($("engine-why"), why ? `No changes are possible here: ${why}.` : "");
  }

  async call(method, path, body) {
    const headers = { "Content-Type": "application/json" };
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    const answer = await fetch(`v1/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const found = await answer.json().catch(() => null);
    if (!answer.ok) throw new Error(found?.error?.message ?? `the router answers with ${answer.status}`);
    const behind = answer.headers.get("x-tercet-behind");
    if (behind) this.notice(`Done, but ${behind}`);
    return found;
  }

  // Returns true if the change was made.
  async change(question, ...call) {
    if (!(await asked(question))) return false;
    try { await this.call(...call); } catch (error) { this.notice(`Not changed: ${error.message}`); return false; }
    return true;
  }

  open(state, name) {
    this.name = name; this.more = {};
    this.fresh = true;
    this.draw(state);
    $("engine-dialog").showModal();
    if (!this.why) this.call("GET", "engines").then((engines) => { this.more = engines.find((engine) => engine.name === this.name) ?? {}; this.draw(state); }, () => {});
  }

  draw(state) {
    const index = state.engines.findIndex((engine) => engine.name === this.name);
    if (index < 0) return;
    const { name, role } = state.engines[index], row = state.rows[index], said = state.stateOf(index);
    setText($("engine-h"), name);
    const facts = [["state", said || "serves"], ["role", role], ["KV fill", `${(row[KV] / 10).toFixed(1)}%`], ["running", row[RUNNING]], ["waiting", row[WAITING]],
      ["of this router", `${row[HERE]} sequences`], ["step time", ms(row[STEP] / 1000 || null)], ["TTFT", ms(row[TTFT] || null)]];
    const { url, vllm, weights, restarts, met_at: met, log } = this.more;
    facts.push(...[["URL", url], ["vLLM", vllm], ["revision", weights], ["restarts", restarts], ["answers since", met && `${long(state.t - met)}, as this router knows`], ["log", log]].filter(([, value]) => value || value === 0));
    $("engine-facts").replaceChildren(...facts.flatMap(([term, value]) => [element("dt", {}, term), element("dd", {}, String(value))]));
    this.draining = said === "draining";
    setText($("drain"), this.draining ? "End the drain" : "Drain");
    if (this.fresh) { $("role").value = role; this.fresh = false; }
  }

  drain() {
    const path = `engines/${encodeURIComponent(this.name)}/drain`;
    if (this.draining) return this.change(`End the drain of ${this.name}: it is picked again.`, "DELETE", path);
    return this.change(`Drain ${this.name}: it gets no new requests, and its running sequences move or finish.`, "POST", path);
  }

  setRole() {
    const role = $("role").value;
    return this.change(`${this.name} gets the role ${role}.`, "PUT", `engines/${encodeURIComponent(this.name)}/role`, { role });
  }

  async openSwitch() {
    try { this.plan = await this.call("GET", "program"); } catch (error) { this.notice(error.message); return; }
    const { split, program, args, name, source } = this.plan;
    const one = { program, ...(args && { args }), ...(name && { name }), ...(source && { source }), weight: 1 };
    this.shares = (split?.length ? split : [one]).map((share) => ({ weight: 1, ...share }));
    this.drawShares();
    $("switch-dialog").showModal();
  }

  drawShares() {
    setText($("switch-why"), "");
    $("switch-rows").replaceChildren(...this.shares.map((share, at) => {
      const name = share.name ?? share.program;
      const weight = element("input", { type: "number", min: 0, step: "any", value: share.weight, "aria-label": `Weight of ${name}`, oninput: () => { share.weight = Number(weight.value); } });
      const gone = element("button", { type: "button", disabled: this.shares.length === 1, onclick: () => { this.shares.splice(at, 1); this.drawShares(); } }, "Remove");
      return element("div", { class: "share" }, element("span", {}, name), weight, gone);
    }));
    const known = this.shares.map((share) => share.name ?? share.program);
    $("switch-add").replaceChildren(element("option", { value: "" }, "a built-in program…"), ...BUILT_IN.filter((name) => !known.includes(name)).map((name) => element("option", {}, name)));
  }

  addShare() {
    if ($("switch-add").value) this.shares.push({ program: $("switch-add").value, weight: 1 });
    this.drawShares();
  }

  async switchPrograms() {
    const total = this.shares.reduce((sum, share) => sum + share.weight, 0);
    if (!(total > 0) || this.shares.some((share) => !(share.weight >= 0))) { setText($("switch-why"), "Each weight must be at least 0, and one weight must be greater than 0."); return; }
    const said = this.shares.map((share) => `${share.name ?? share.program} ${Math.round((100 * share.weight) / total)}%`).join(", ");
    const { rules, sticky } = this.plan, only = this.shares.length === 1;
    const [{ weight, ...first }] = this.shares;
    const plan = { ...(only ? first : { split: this.shares }), ...(rules?.length && { rules }), ...(sticky && !only && { sticky }) };
    if (await this.change(`From now on requests get: ${said}.`, "PUT", "program", plan)) $("switch-dialog").close();
  }
}

// Opens a dialog to confirm; returns true only if its Yes button is pressed.
function asked(question) {
  setText($("confirm-what"), question);
  const dialog = $("confirm-dialog");
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((answer) => { dialog.addEventListener("close", () => answer(dialog.returnValue === "yes"), { once: true }); });
}
