// The plans of a planner, and their results. A router without a planner answers null; an older router lacks the route.

import { $, element, setText, NONE } from "./dom.js";

const EVERY_MS = 5000, SHOWN = 12;

export class PlannerView {
  // `call` calls an admin route, `clock` formats a time.
  constructor(call, clock) { this.call = call; this.clock = clock; this.timer = null; }

  start() { if (this.timer === null) this.look(); }

  stop() { clearTimeout(this.timer); this.timer = null; $("planner").hidden = true; }

  async look() {
    this.timer = setTimeout(() => this.look(), EVERY_MS);
    if (document.hidden) return;
    let report = null;
    try { report = await this.call("GET", "planner"); } catch { /* the stream reports errors of the router */ }
    if (this.timer !== null) this.draw(report);
  }

  draw(report) {
    $("planner").hidden = !report;
    if (!report) return;
    setText($("planner-said"), `${report.planner}, every ${report.interval} s: ${report.act === "advise" ? "it only advises" : "it changes the fleet"}`);
    const rows = report.plans.slice(-SHOWN).reverse().map((plan) => {
      const stays = plan.fleet === plan.wanted;
      const missed = plan.expected !== null && plan.came !== null && plan.came < plan.expected - 0.1;
      return element("tr", {},
        element("td", { class: "n" }, this.clock(plan.at)),
        element("td", { class: stays ? "" : "wanted" }, stays ? plan.fleet : `${plan.fleet} → ${plan.wanted}`),
        element("td", { class: "n" }, percent(plan.expected)), element("td", { class: missed ? "n bad" : "n" }, percent(plan.came)),
        element("td", {}, plan.steps.length ? plan.steps.join("; ") : "no change"), element("td", {}, plan.reason));
    });
    $("plan-table").replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { class: "empty", colSpan: 6 }, "No plan yet."))]));
  }
}

function percent(share) { return share === null || share === undefined ? NONE : `${(100 * share).toFixed(1)}%`; }
