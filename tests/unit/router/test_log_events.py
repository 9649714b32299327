"""Every change, fallback and retry is one line of the log, with its reason; what concerns a request is in its trace."""

from __future__ import annotations

import asyncio
import contextlib
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tercet import logs
from tercet.fleet import Trace
from tercet.logs import EVENTS, FIELDS, LogEvent
from tercet.protocol import EngineUnreachable, NoSpace, Output, ProgramFailed, Request, TercetError
from tercet.protocol.spans import TraceEvent
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.plans import Plan
from tercet.router.serve.service import RequestRun, Service
from tercet.router.state.fleet_state import FleetState, StateFile
from tercet.router.state.loaded_code import reload_on_change
from tercet.router.state.shared_state import because
from tercet.settings import RetryBudget
from tercet.wire.serving.server_access import RequestContext

from .conftest import Engine, LiveRouter, counted, draining
from .test_reload import TEXT, until
from .test_shared_state import joined

EVERY_EVENT = [each for each in vars(logs).values() if isinstance(each, LogEvent)]
HANDBOOK = Path(__file__).resolve().parents[3] / "docs" / "logs.md"
GROUPED = """
import asyncio
from tercet.protocol import NoSpace

async def full():
    raise NoSpace("no room")

async def wrong():
    raise ValueError("a mistake")

async def fleets(request, fleet):
    async with asyncio.TaskGroup() as group:
        group.create_task(full())
        await asyncio.sleep(60)
    yield

async def fleets_at_the_end(request, fleet):
    async with asyncio.TaskGroup() as group:
        group.create_task(full())
    yield

async def own(request, fleet):
    async with asyncio.TaskGroup() as group:
        group.create_task(full())
        group.create_task(wrong())
        await asyncio.sleep(60)
    yield
"""


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[..., list[dict[str, Any]]]:
    """The fields of the events so far, of the kinds that are named, or of all."""
    caplog.set_level("INFO", "tercet")

    def found(*kinds: LogEvent) -> list[dict[str, Any]]:
        fields = [getattr(record, FIELDS) for record in caplog.records if record.name == EVENTS]
        return [each for each in fields if not kinds or each["event"] in [kind.name for kind in kinds]]

    return found


Told = Callable[..., list[dict[str, Any]]]


async def served(router: LiveRouter) -> tuple[Trace, list[int]]:
    router.number += 1
    trace = Trace()
    request = Request(seq_id=f"s{router.number}", prompt=tuple(range(100)))
    return trace, [token async for output in router.service.run(request, trace) for token in output.token_ids]


# ---- the vocabulary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.name)
def test_an_event_says_its_fields_in_words_and_is_in_the_handbook(
    event: LogEvent, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {name: name.upper() for _, name, _, _ in string.Formatter().parse(event.words) if name}
    event.tell(**fields)
    assert told() == [{"event": event.name, **fields}]
    assert caplog.messages[0].startswith(f"{event.name}: ")
    assert "RE" in caplog.messages[0], "why, or what came of it"
    assert f"`{event.name}`" in HANDBOOK.read_text(encoding="utf-8")


def test_names_are_taken_once() -> None:
    names = [event.name for event in EVERY_EVENT]
    assert sorted(set(names)) == sorted(names)


# ---- changes -----------------------------------------------------------------------------------------------------


async def test_each_change_is_one_line_with_who_asked(router: LiveRouter, programs: str, told: Told) -> None:
    router.engines["http://late"] = Engine("late")
    async with router.client() as client:
        for method, path, body in (
            ("POST", "/engines/d/drain", None),
            ("POST", "/engines/d/drain", None),  # it is drained already: nothing changes
            ("DELETE", "/engines/d/drain", None),
            ("PUT", "/engines/d/role", {"role": "both"}),
            ("POST", "/engines", {"name": "late", "url": "http://late", "role": "decode"}),
            ("DELETE", "/engines/late", None),
            ("PUT", "/program", {"program": f"{programs}:good"}),
        ):
            assert (await client.request(method, path, json=body)).status_code < 300
    drain = "/tercet/v1/engines/d/drain"
    assert [(each["event"], each["reason"]) for each in told()] == [
        ("engine_drained", f"POST {drain} from 127.0.0.1"),
        ("engine_undrained", f"DELETE {drain} from 127.0.0.1"),
        ("engine_role", "PUT /tercet/v1/engines/d/role from 127.0.0.1"),
        ("engine_added", "POST /tercet/v1/engines from 127.0.0.1"),
        ("engine_removed", "DELETE /tercet/v1/engines/late from 127.0.0.1"),
        ("program_changed", "PUT /tercet/v1/program from 127.0.0.1"),
    ]
    assert told(logs.ENGINE_ROLE)[0] | {"role": "both", "before": "decode"} == told(logs.ENGINE_ROLE)[0]
    assert told(logs.PROGRAM_CHANGED)[0]["version"] == 2


async def test_changes_that_are_found_at_once_have_each_its_own_reason(
    router: LiveRouter, metrics: Metrics, programs: str, told: Told
) -> None:
    async with joined(router, metrics):
        router.shared.logs_changes = False
        path = router.directory / "state.json"
        StateFile(path).update(because_of("one", lambda state: state.with_draining("d", True)), router.shared.state)
        StateFile(path).update(because_of("two", lambda state: state.with_draining("d", False)), router.shared.state)
        StateFile(path).update(because_of("three", lambda state: state.with_role("p", "both")), router.shared.state)
        StateFile(path).update(lambda state: state.with_draining("p", True), router.shared.state)  # by hand
        await until(lambda: len(told()) == 4)
    assert [(each["event"], each["engine"], each["reason"]) for each in told()] == [
        ("engine_drained", "d", "one"),
        ("engine_undrained", "d", "two"),
        ("engine_role", "p", "three"),
        ("engine_drained", "p", f"found in {path}"),
    ]


def because_of(reason: str, change: Callable[[FleetState], FleetState]) -> Callable[[FleetState], FleetState]:
    return lambda state: because(reason, state, change(state))


async def test_what_is_refused_changes_nothing_and_is_no_event(router: LiveRouter, told: Told) -> None:
    async with router.client() as client:
        assert (await client.post("/engines/nobody/drain")).status_code == 404
        assert (await client.put("/program", json={"program": "nothing"})).status_code == 400
    assert told() == []


async def test_of_several_workers_one_tells_what_all_of_them_do(
    router: LiveRouter, metrics: Metrics, told: Told
) -> None:
    async with joined(router, metrics) as other:
        other.shared.logs_changes = False
        await router.shared.change(draining("d", True))
        assert other.fleet.member("d").draining
        assert len(told()) == 1


async def test_another_router_on_the_same_state_has_lines_of_its_own(
    router: LiveRouter, metrics: Metrics, told: Told
) -> None:
    async with joined(router, metrics) as other:
        await router.shared.change(draining("d", True), "somebody wants it")
        assert other.fleet.member("d").draining
        assert [each["reason"] for each in told(logs.ENGINE_DRAINED)] == ["somebody wants it"] * 2


async def test_a_reload_is_one_line_and_so_is_a_refused_one(router: LiveRouter, tmp_path: Path, told: Told) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEXT.format(1))
    await router.use(Plan(program=f"{file}:main"))
    watching = asyncio.ensure_future(reload_on_change(router.shared, every=0.01))
    await asyncio.sleep(0)
    try:
        file.write_text("syntax error(")
        await until(lambda: bool(told(logs.RELOAD_REFUSED)))
        file.write_text(TEXT.format(22))
        await until(lambda: len(told(logs.PROGRAM_CHANGED)) == 2)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    _, refused, changed = told()
    assert (refused["event"], refused["file"], refused["code"]) == ("reload_refused", str(file), "bad_request")
    assert "SyntaxError" in refused["reason"]
    assert (changed["event"], changed["reason"]) == ("program_changed", f"{file} has changed")


# ---- engines -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_engine_that_is_lost_and_found_is_two_lines(router: LiveRouter, told: Told) -> None:
    router.engine("d").gone = True
    for _ in range(2):
        await router.membership.look()
    router.engine("d").gone = False
    for _ in range(2):
        await router.membership.look()
    lost, back = told()
    assert (lost["event"], lost["engine"]) == ("engine_lost", "d")
    assert "has not answered within" in lost["reason"]
    assert (back["event"], back["engine"]) == ("engine_back", "d")


async def test_an_engine_that_does_not_fit_is_refused_with_the_reason(router: LiveRouter, told: Told) -> None:
    router.engine("d").max_model_len = 10
    for _ in range(2):
        await router.membership.look()
    router.engine("d").max_model_len = 1000
    await router.membership.look()
    refused, back = told()
    assert (refused["event"], refused["code"], back["event"]) == ("engine_refused", "bad_request", "engine_back")
    assert "max_model_len 10" in refused["reason"]


async def test_a_role_that_others_fill_is_told_when_it_begins_and_ends(router: LiveRouter, told: Told) -> None:
    await router.shared.change(draining("d", True))
    for _ in range(2):
        trace, _ = await served(router)
        fallback = next(event for event in trace.events if event.verb == "fallback")
        assert (fallback.engine, fallback.reason) == (
            "p", "decode -> prefill: every engine of the role decode is drained or stops",
        )  # fmt: skip
    await router.shared.change(draining("d", False))
    await served(router)
    begins, ends = told(logs.ROLE_FALLBACK, logs.ROLE_BACK)
    assert (begins["event"], begins["role"]) == ("role_fallback", "decode")
    assert begins["reason"] == "every engine of the role decode is drained or stops"
    assert (ends["event"], ends["role"]) == ("role_back", "decode")


# ---- requests ----------------------------------------------------------------------------------------------------


async def test_a_fallback_is_one_line_one_count_and_one_event_of_the_trace(router: LiveRouter, told: Told) -> None:
    router.engine("d").failures["prep_recv"] = EngineUnreachable("d does not answer: Connection refused")
    trace, tokens = await served(router)
    assert tokens == [100, 101, 102]
    why = "d does not answer: Connection refused"
    assert trace.program == "disaggregated -> data_parallel"
    assert [structs.replace(event, at=0.0) for event in trace.events if event.verb == "fallback"] == [
        TraceEvent("fallback", "d", reason=f"disaggregated -> data_parallel: {why}", code="engine_unreachable")
    ]
    (line,) = told(logs.FALLBACK, logs.RETRY)
    assert line == {
        "event": "fallback", "seq_id": "s1", "program": "disaggregated", "to": "data_parallel", "engine": "d",
        "code": "engine_unreachable", "tokens": 0, "reason": why,
    }  # fmt: skip
    assert counted("tercet_fallbacks_total", program="disaggregated", code="engine_unreachable") == 1
    assert counted("tercet_retries_total", code="engine_unreachable", stage="before_first_token") == 1
    assert counted("tercet_verb_seconds_count", verb="fallback", engine="d") == 0


async def test_each_further_attempt_is_a_line_too(router: LiveRouter, told: Told) -> None:
    await router.use(Plan(program="data_parallel"))
    for name in ("p", "d"):
        router.engine(name).failures["start_generate"] = NoSpace(f"{name} is full")
    trace, request = Trace(), Request(seq_id="s", prompt=(1, 2, 3))
    with pytest.raises(NoSpace):
        await router.service.run(request, trace).run(lambda _: None)
    lines = told(logs.FALLBACK, logs.RETRY)
    assert [(each["event"], each["program"], each["code"]) for each in lines] == [
        ("retry", "data_parallel", "no_space"), ("retry", "data_parallel", "no_space"),
    ]  # fmt: skip
    assert {each["engine"] for each in lines} == {"p", "d"}
    assert [event.reason for event in trace.events if event.verb == "retry"] == [
        f"data_parallel again: {each['engine']} is full" for each in lines
    ]
    assert counted("tercet_fallbacks_total", program="data_parallel", code="no_space") == 0


@pytest.mark.parametrize(
    ("name", "code"), [("fleets", "no_space"), ("fleets_at_the_end", "no_space"), ("own", "program_failed")]
)
async def test_the_cause_in_a_group_of_tasks_is_the_cause(
    router: LiveRouter, tmp_path: Path, name: str, code: str, told: Told
) -> None:
    (tmp_path / "grouped.py").write_text(GROUPED)
    await router.use(Plan(program=f"{tmp_path / 'grouped.py'}:{name}"))
    await served(router)
    (line,) = told(logs.FALLBACK)
    assert (line["code"], line["reason"]) == (code, "ValueError: a mistake" if name == "own" else "no room")


@pytest.mark.parametrize("dev", [False, True])
async def test_what_a_program_raised_is_for_the_log_and_for_clients_of_those_who_develop(
    router: LiveRouter, metrics: Metrics, programs: str, told: Told, dev: bool
) -> None:
    router.service = Service(
        router.fleet, f"{programs}:raises", {}, metrics, retries=RetryBudget(retries=1), tells_faults=dev
    )  # fmt: skip
    trace, _ = await served(router)
    (event,) = [event for event in trace.events if event.verb == "fallback"]
    assert event.reason == f"{trace.program}: " + ("ValueError: oh no" if dev else "the router's log says why")
    assert [each["reason"] for each in told(logs.FALLBACK)] == ["ValueError: oh no"]


async def test_a_client_of_a_program_that_failed_is_told_which_and_where(
    router: LiveRouter, metrics: Metrics, programs: str, told: Told
) -> None:
    router.service = Service(router.fleet, f"{programs}:raises", {}, metrics, retries=RetryBudget(retries=0))
    with pytest.raises(ProgramFailed) as failed:
        await served(router)
    assert failed.value.message == f"the program {programs}:raises failed at s1: the router's log says why"
    RequestRun(router.service, Request(seq_id="s1", prompt=(1,)), RequestContext()).failed(failed.value)
    (line,) = told(logs.REQUEST_FAILED)
    assert line["reason"] == f"{failed.value.message} (ValueError: oh no)"


async def test_a_program_that_fails_again_and_again_is_one_traceback(
    router: LiveRouter, programs: str, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    await router.use(Plan(program=f"{programs}:raises"))
    for _ in range(3):
        await served(router)
    assert len(told(logs.PROGRAM_FAILED)) == 1
    assert caplog.text.count('raise ValueError("oh no")') == 1
    assert [each["code"] for each in told(logs.FALLBACK)] == ["program_failed"] * 3
    (returned,) = told(logs.PROGRAM_RETURNED)
    assert (returned["version"], returned["to_version"]) == (2, 1)
    assert returned["reason"] == "it failed 3 times in a row, the last time: ValueError: oh no"


async def test_an_engine_that_breaks_a_sequence_off_is_named(router: LiveRouter, told: Told) -> None:
    await router.use(Plan(program="data_parallel"))
    for engine in (router.engine("p"), router.engine("d")):
        engine.breaks_off = Output((), "abort")
    with contextlib.suppress(TercetError):
        await served(router)
    lines = told(logs.RETRY)
    assert {each["engine"] for each in lines} == {"p", "d"}
    assert [each["reason"] for each in lines] == [f"{each['engine']} ended the sequence: abort" for each in lines]
    assert {each["code"] for each in lines} == {"engine_error"}


async def test_engines_that_start_with_their_router_are_not_reported_as_lost(router: LiveRouter, told: Told) -> None:
    for name in ("p", "d"):
        router.engine(name).gone = True
    with pytest.raises(EngineUnreachable):
        await router.membership.until_ready(0.05)
    assert not any(member.reachable for member in router.fleet.members)
    for name in ("p", "d"):
        router.engine(name).gone = False
    await router.membership.until_ready()
    assert all(member.reachable for member in router.fleet.members)
    assert told() == []
