"""The page in headless Chromium: it draws what a fleet does, changes it by a click, and reads a recorded run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.decisions.planning import PlannerReport, ReportedPlan
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.moves import MoveRecord
from tercet_lab.bench.simulated import Experiment, Fleet, Record, SyntheticWorkload
from tercet_lab.commands.run_page import RecordedPage

from .chromium import COMMAND, MISSING, Tab, chromium
from .page_fleet import page_fleet, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMMAND is None, reason=MISSING), pytest.mark.timeout(600)]
ADMIN = "the-admin-key"
LIVE = "document.querySelector('#status')?.innerText === 'live'"
SET = """(() => {{
    const field = document.querySelector('{}');
    field.value = {};
    field.dispatchEvent(new Event('{}'));
}})()"""
NO_SIDEWAYS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with chromium(tmp_path / "browser") as tab:
        yield tab


async def drawn(tab: Tab, canvas: str) -> int:
    """How many of a canvas's pixels have colour."""
    script = f"""(() => {{
        const canvas = document.querySelector('{canvas}');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let found = 0;
        for (let i = 3; i < pixels.length; i += 4) found += pixels[i] > 0;
        return found;
    }})()"""
    return await tab.js(script)


async def test_a_fleet_is_drawn_and_drained_by_a_click(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics, admin_key=ADMIN, keys=["a-clients-key"]) as fleet, served(fleet.app) as url:
        await tab.open(f"{url}/tercet")
        await tab.until("document.querySelector('#key-dialog').open")
        tab.problems.clear()  # the refusal that made it ask
        await tab.js(f"document.querySelector('#key-value').value = {json.dumps(ADMIN)}")
        await tab.click("#key-use")
        await tab.until(LIVE)
        assert await tab.js("[...document.querySelectorAll('.card')].map((c) => c.title.split(':')[0])") == [
            "prefill-0", "decode-0", "decode-1",
        ]  # fmt: skip
        assert await tab.js("sessionStorage.getItem('tercet-key')") == ADMIN
        assert await tab.js("Object.values(localStorage).join()") == ""

        traces = await asyncio.gather(*(fleet.ask(output=20) for _ in range(3)))
        assert {trace.program for trace in traces} == {"disaggregated"}
        await tab.until("document.querySelector('#program-table').innerText.includes('disaggregated\\t100%\\t3')")
        assert await drawn(tab, "#lanes") > 500
        await tab.js("document.querySelector('#requests details').open = true")
        await tab.until("document.querySelector('#lane-table').innerText.includes('remote_send prefill-0→decode-')")

        await tab.click(".card[aria-label^='decode-1']")
        await tab.until("document.querySelector('#engine-dialog').open")
        await tab.click("#drain")
        await tab.until("document.querySelector('#confirm-dialog').open")
        assert not fleet.fleet.member("decode-1").draining  # a question, so far
        await tab.click("#confirm-dialog button[value='cancel']")
        await tab.until("!document.querySelector('#confirm-dialog').open")
        assert not fleet.fleet.member("decode-1").draining
        await tab.click("#drain")
        await tab.until("document.querySelector('#confirm-dialog').open")
        await tab.click("#confirm-yes")
        await tab.until("document.querySelector('#engine-facts').innerText.includes('draining')")
        assert fleet.fleet.member("decode-1").draining
        assert [asked for asked in tab.urls if not asked.startswith((url, "about:"))] == []
        assert tab.problems == []


async def test_who_comes_after_an_incident_sees_it(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics) as fleet, served(fleet.app) as url:
        fleet.service.observers.append(fleet.history)
        await asyncio.gather(*(fleet.ask(output=20) for _ in range(3)))
        metrics.refused.labels("queue_full").inc(4)
        fleet.history.take()
        await tab.open(f"{url}/tercet")
        await tab.until(LIVE)
        await tab.until("document.querySelector('#program-legend').innerText === 'disaggregated'")
        for engine in list(fleet.engines):
            fleet.fleet.remove(engine)
        await asyncio.gather(*(fleet.ask(output=20) for _ in range(2)))
        metrics.refused.labels("queue_full").inc(4)
        await tab.until(
            "[...document.querySelectorAll('.number[data-is=bad] span')].map((e) => e.innerText).join()"
            " === 'failures/s,refusals/s'"
        )
        assert tab.problems == []


async def test_history_and_frames_make_one_line_without_a_hole(tab: Tab, metrics: Metrics) -> None:
    """The point in which the page was opened counts once, and so do the frames that it covers."""
    async with page_fleet(3, metrics) as fleet, served(fleet.app) as url:
        await tab.open(f"{url}/tercet")
        of_frames = "[8, 8.5, 9.5, 10, 10.5].map((t) => ({t, seconds: 0.5, programs: {}}))"
        shown = await tab.js(
            "import('./js/state.js').then(({ FleetState }) => { const state = new FleetState();"
            f" state.points = {of_frames};"
            " const before = state.allPoints().length;"
            " state.past = [5, 10, 15].map((t) => ({t, seconds: 5, programs: {}}));"
            " return [before, state.allPoints().map((point) => [point.t - point.seconds, point.t])] })"
        )
        # Charts of 18 s have bins of 0.2 s; a point counts in each bin that it covers.
        rates = await tab.js(
            "import('./js/charts.js').then(({ Charts }) => {"
            " const of = (t, seconds) => ({t, seconds, programs: {a: [0, 0, 100 * seconds, null, null, null, null]}});"
            " const bins = Charts.prototype.bins([of(1005, 5), of(1010, 5), of(1010.5, 0.5)], 1000, 1018);"
            " return bins.map((bin) => bin.has('a') ? Math.round(bin.get('a').tokens / bin.get('a').seconds) : null) })"
        )
    assert shown == [5, [[0, 5], [5, 10], [10, 10.5]]]
    assert set(rates[1:52]) == {100}
    assert set(rates[53:]) == {None}


async def test_no_row_of_moves_is_cut(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics) as fleet, served(fleet.app) as url:
        for number in range(1, 31):
            fleet.service.moves._record.append(
                MoveRecord(number, "s", "prefill-0", "decode-0", "rebalance", 0.0, 9, "moved", pause=0.1)
            )
        await tab.open(f"{url}/tercet")
        await tab.until("document.querySelectorAll('#move-table tr').length === 30")
        for width in (360, 768, 1200, 1920):
            await tab.size(width, 900)
            whole = await tab.until(
                "(() => { const box = document.querySelector('#moves .scroll').getBoundingClientRect();"
                " const ends = [...document.querySelectorAll('#moves tr')].map(r => r.getBoundingClientRect().bottom);"
                " return ends.at(-1) > box.bottom + 100 && box.height > 200 && box.height <= 300.5"
                " && ends.some((end) => Math.abs(end - box.bottom) < 1) })()"
            )
            assert whole, f"a row is cut at {width} px"
            assert tab.problems == []


async def test_an_engine_tells_its_address_and_its_restarts(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics) as fleet, served(fleet.app) as url:
        fleet.fleet.member("decode-1").restarts = 2
        await tab.open(f"{url}/tercet")
        await tab.until(LIVE)
        await tab.click(".card[aria-label^='decode-1']")
        await tab.until("document.querySelector('#engine-facts').innerText.includes('http://decode-1')")
        facts = await tab.text("#engine-facts")
        assert "restarts\n2" in facts
        assert "as this router knows" in facts
        await tab.click("#engine-dialog menu button")
        await tab.click("#help")
        assert "the last 15 minutes" in await tab.text("#help-dialog")
        assert (await tab.text("#help-version")).startswith("Tercet ")
        assert await tab.js("[...document.querySelectorAll('nav button:not([hidden])')].every((b) => b.title)")


async def test_four_charts_fill_their_rows_and_no_table_is_cut(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics) as fleet, served(fleet.app) as url:
        record = fleet.service.moves._record
        record.append(MoveRecord(1, "s", "prefill-433", "decode-433", "rebalance", 0.0, 9, "moved", pause=0.1234))
        await tab.open(f"{url}/tercet")
        await tab.until(LIVE)
        for width, columns in ((360, 1), (768, 2), (1200, 2), (1920, 4)):
            await tab.size(width, 900)
            await tab.until(f"innerWidth === {width}")
            rows = "getComputedStyle(document.querySelector('#chart-grid')).gridTemplateColumns.split(' ').length"
            assert await tab.js(rows) == columns
            assert await tab.js(NO_SIDEWAYS)
            cut = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
            assert await tab.js(cut) == 0, width


async def test_programs_are_switched_after_a_question(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics) as fleet, served(fleet.app) as url:
        await tab.open(f"{url}/tercet")
        await tab.until(LIVE)
        await tab.click("#switch")
        await tab.until("document.querySelector('#switch-dialog').open")
        await tab.js(SET.format("#switch-add", "'data_parallel'", "change"))
        await tab.click("#switch-go")
        await tab.until("document.querySelector('#confirm-dialog').open")
        assert "disaggregated 50%, data_parallel 50%" in await tab.text("#confirm-what")
        await tab.click("#confirm-yes")
        await tab.until("document.querySelector('#split').innerText.includes('data_parallel 50%')")
        assert [share.label for share in fleet.service.routing.current.plan.shares] == [
            "disaggregated",
            "data_parallel",
        ]
        assert tab.problems == []


async def test_a_clients_key_shows_the_fleet_and_changes_nothing(tab: Tab, metrics: Metrics) -> None:
    async with page_fleet(3, metrics, admin_key=ADMIN, keys=["a-clients-key"]) as fleet, served(fleet.app) as url:
        await tab.open(f"{url}/tercet/")
        await tab.until("document.querySelector('#key-dialog').open")
        tab.problems.clear()
        await tab.js("sessionStorage.setItem('tercet-key', 'a-clients-key')")
        await tab.call("Page.reload")
        await tab.until(LIVE)
        assert await tab.js("document.querySelector('#drain').disabled && document.querySelector('#switch').disabled")
        assert "admin key" in await tab.js("document.querySelector('#switch').title")
        assert tab.problems == []


def behind_a_prefix(app: ASGIApp, prefix: str) -> ASGIApp:
    """As a proxy that serves a router below a path."""

    async def proxied(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith(prefix), scope["path"]
        path = scope["path"].removeprefix(prefix)
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    return proxied


async def test_a_planners_proposals_are_shown_below_a_prefix_and_with_a_key(tab: Tab, metrics: Metrics) -> None:
    plans = (
        ReportedPlan(at=1.0, fleet="1P2D", wanted="1P2D", reason="all is well", expected=0.99, came=0.7),
        ReportedPlan(
            at=2.0, fleet="1P2D", wanted="2P1D", reason="<b>prefills wait</b>", expected=0.95,
            steps=("tercet engines role decode-1 prefill",),
        ),
    )  # fmt: skip
    report = PlannerReport(act="advise", planner="simulate", interval=60.0, margin=0.05, plans=plans)
    async with page_fleet(3, metrics, admin_key=ADMIN) as fleet, served(behind_a_prefix(fleet.app, "/a/b")) as url:
        await fleet.shared.planner.store(report)
        await tab.open(f"{url}/a/b/tercet")
        await tab.until("document.querySelector('#key-dialog').open")
        tab.problems.clear()
        assert await tab.js("document.querySelector('#planner').hidden")
        await tab.js(f"document.querySelector('#key-value').value = {json.dumps(ADMIN)}")
        await tab.click("#key-use")
        await tab.until("document.querySelectorAll('#plan-table tr').length === 2")
        first, second = (await tab.text("#plan-table")).splitlines()
        assert "1P2D → 2P1D" in first
        assert "tercet engines role decode-1 prefill" in first
        assert "<b>prefills wait</b>" in first
        assert "no change" in second
        assert await tab.text("#plan-table td.bad") == "70.0%"
        assert await tab.js(NO_SIDEWAYS)
        assert tab.problems == []


@pytest.mark.parametrize("engines", [1000])
async def test_large_fleets_fit_every_width_in_light_and_dark(tab: Tab, metrics: Metrics, engines: int) -> None:
    async with page_fleet(engines, metrics) as fleet, served(fleet.app) as url:
        await tab.open(f"{url}/tercet/")
        await tab.until(LIVE)
        assert await tab.js("document.querySelectorAll('#map button').length") == engines
        await tab.js("document.querySelector('#map button').focus()")
        for key in ("ArrowRight", "ArrowDown", "End"):
            await tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert await tab.js("document.activeElement === [...document.querySelectorAll('#map button')].at(-1)")
        backgrounds = set[str]()
        for width, dark in ((360, False), (360, True), (1280, True), (1280, False)):
            await tab.size(width, 900, dark)
            await tab.until(NO_SIDEWAYS)
            backgrounds.add(await tab.js("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2
        assert len(fleet.service.observers) == 1
        assert tab.problems == []


async def test_a_recorded_run_has_a_slider(tab: Tab, tmp_path: Path) -> None:
    workload = SyntheticWorkload(rate=1, requests=120)
    simulation = Experiment(
        program="disaggregated",
        fleet=Fleet("1P2D", profile="llama-3.1-8b-h100-tp1"),
        work=workload,
        record=Record(frames_every=0.1),
    )
    report = await asyncio.to_thread(simulation.report, [20.0], "x")
    async with served(RecordedPage(report.to_json())) as url:
        await tab.open(f"{url}/")
        await tab.until("document.querySelector('#status').innerText === 'recorded run'")
        end = float(await tab.js("document.querySelector('#time').max"))
        assert end > 5
        counts = list[int]()
        for share in (0.9, 0.2, 0.5):  # back and forth
            await tab.js(SET.format("#time", end * share, "input"))
            counts.append(await drawn(tab, "#lanes"))
            assert f"{end * share:.1f} of" in await tab.text("#clock")
        assert min(counts) > 500
        assert await tab.js("document.querySelector('#switch').hidden")
        assert await tab.js(NO_SIDEWAYS)
        assert tab.problems == []
