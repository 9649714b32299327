// The page: frames of a router or of a recorded run go into one state, and the same code draws both.

import { $, setText, long, wholeRows } from "./dom.js";
import { FleetState } from "./state.js";
import { about, past, Stream } from "./stream.js";
import { FleetMap } from "./fleetmap.js";
import { Lanes } from "./lanes.js";
import { Charts, ProgramStyles } from "./charts.js";
import { Numbers, Slowest, Programs, drawMoves } from "./tables.js";
import { Actions } from "./actions.js";
import { PlannerView } from "./planner.js";
import { Player, runsOf } from "./player.js";

const KEY = "tercet-key", THEME = "tercet-theme", THEMES = ["auto", "light", "dark"];
// By then the router has its point of the time in which the page was opened: it takes one every five seconds.
const HISTORY_MS = 6000;
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const state = new FleetState(), styles = new ProgramStyles(), lanes = new Lanes(), charts = new Charts(styles);
const numbers = new Numbers(), programs = new Programs(styles), slowest = new Slowest((name) => openEngine(name));
const map = new FleetMap((name) => openEngine(name));
const actions = new Actions({ key: () => sessionStorage.getItem(KEY), notice });
const planner = new PlannerView((...call) => actions.call(...call), (t) => lanes.clock(t));
const player = new Player(state, () => draw());
let mode = "live", server = null, stream = null, paused = false, waiting = [], offset = null;

function openEngine(name) { actions.open(state, name); }

function notice(text) { $("notice").hidden = !text; setText($("notice"), text ?? ""); }

function status(text, is) { setText($("status"), text); $("status").dataset.is = is; }

const clock = (t) => lanes.clock(t);

// In a live page the right edge of the lanes is a little behind the last frame, so that it moves evenly between frames.
function liveNow() { return Math.min(state.t, performance.now() / 1000 + offset); }

function draw() {
  const recorded = mode === "recorded", now = recorded ? player.now : state.t;
  numbers.draw(state); map.draw(state); slowest.draw(state); programs.draw(state); drawMoves(state, clock);
  lanes.draw(state, recorded ? now : liveNow()); lanes.table(state, now);
  charts.draw(state, now, recorded ? [player.begin, player.end] : null, recorded ? player.points : state.allPoints());
  if ($("engine-dialog").open) actions.draw(state);
  const { about: of } = state;
  if (of) setText($("subject"), [of.model, `programs v${of.version}`, of.roles === "auto" && "roles follow the load", (of.workers ?? 1) > 1 && `${of.workers} workers`, server?.tercet && `Tercet ${server.tercet}`, of.since && `up ${long(state.t - of.since)}`].filter(Boolean).join(" · "));
  if (!recorded && stream && !paused) status(of?.why ? `not serving: ${of.why}` : "live", of?.why ? "bad" : "good");
}

function onFrame(frame) {
  if (paused) { if (frame.whole) waiting = []; waiting.push(frame); if (waiting.length > 1200) { waiting = []; stream.aborting.abort(); } return; }
  state.apply(frame);
  const at = frame.t - performance.now() / 1000 - 0.6;
  offset = offset === null || Math.abs(at - offset) > 2 ? at : offset * 0.9 + at * 0.1;
  draw();
}

function animate() {
  if (mode === "live" && !paused && !calm.matches && !document.hidden && stream && state.lanes.size) lanes.draw(state, liveNow());
  setTimeout(() => requestAnimationFrame(animate), 60);
}

function readPast() { past(sessionStorage.getItem(KEY)).then((points) => { state.past = points; }, () => {}); }

function connect() {
  stream?.stop();
  stream = new Stream({
    key: sessionStorage.getItem(KEY), onFrame,
    onState: (is, said) => {
      if (is === "live") { notice(""); allow(said); readPast(); setTimeout(readPast, HISTORY_MS); }
      if (is === "away") { status("disconnected, reconnecting", "bad"); if (said) notice(said); }
      if (is === "connecting") status("connecting", "");
    },
    onRefused: (code, said) => { stream = null; status(code === 403 ? "refused" : "key needed", "warn"); actions.allow(said); if (code === 403 && !sessionStorage.getItem(KEY)) notice(said); else askKey(said); },
  });
  stream.run();
}

function allow(view) {
  if (view === "admin" && !server.why_no_changes) planner.start(); else planner.stop();
  actions.allow(server.why_no_changes || (view === "admin" ? "" : "a client key shows the fleet; changes require the admin key"));
}

function askKey(why) {
  if (why) setText($("key-why"), why);
  $("key-value").value = "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key").addEventListener("click", () => askKey());
$("key-dialog").addEventListener("close", () => {
  const chosen = $("key-dialog").returnValue, value = $("key-value").value.trim();
  $("key-value").value = "";
  if (chosen === "use" && value) { sessionStorage.setItem(KEY, value); connect(); }
  if (chosen === "forget") { sessionStorage.removeItem(KEY); connect(); }
});
$("key-value").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); $("key-use").click(); } });

$("pause").addEventListener("click", () => {
  paused = !paused;
  setText($("pause"), paused ? "Resume" : "Pause");
  $("pause").setAttribute("aria-pressed", String(paused));
  if (paused) { status("paused", "warn"); return; }
  for (const frame of waiting.splice(0)) state.apply(frame);
  draw();
});

$("help").addEventListener("click", () => {
  setText($("help-version"), [server?.tercet && `Tercet ${server.tercet}`, state.about?.process && `router process ${state.about.process}`].filter(Boolean).join(" · "));
  $("help-dialog").showModal();
});

function useTheme(theme) {
  setText($("theme"), `Theme: ${theme}`);
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
}
let theme = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto";
useTheme(theme);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  useTheme(theme); map.recolor(); draw();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { map.recolor(); draw(); });
for (const id of ["move-table", "plan-table"]) wholeRows($(id).parentElement, 300);
new ResizeObserver(() => draw()).observe(document.querySelector("main"));

function play(result) {
  const runs = runsOf(result);
  stream?.stop(); stream = null; mode = "recorded"; paused = false; planner.stop();
  $("pause").hidden = true; $("key").hidden = true; $("api").hidden = true; notice("");
  actions.allow("this run has ended");
  $("engine-actions").hidden = true; $("switch").hidden = true;
  status("recorded run", "good");
  player.open(runs);
}

async function openFile(file) {
  try { play(JSON.parse(await file.text())); } catch (error) { notice(`${file.name}: ${error instanceof SyntaxError ? "it is not JSON" : error.message}`); }
}
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { if ($("file").files[0]) openFile($("file").files[0]); });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]); });

async function start() {
  actions.allow("the stream is not open yet");
  try { server = await about(); } catch (error) { status("no server", "bad"); notice(`${error.message}. Load the page again.`); return; }
  if (server.mode === "recorded") { play(await (await fetch("run.json")).json()); return; }
  $("pause").hidden = false;
  connect(); animate();
}
start();
