"""Engines that refuse, die or break off: the request goes on elsewhere, within its budget, and all comes back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.fleet import EngineFleet, Member, RunningSequence, RunningSequences, Trace
from tercet.protocol import (
    BadRequest,
    EngineError,
    EngineNotReached,
    EngineUnreachable,
    GrammarsBusy,
    LayoutMismatch,
    LeaseEnded,
    NoSpace,
    Output,
    Request,
    RoleUnavailable,
    TercetError,
    TransferFailed,
    UnknownSequence,
    from_wire,
)
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service
from tercet.settings import EngineAddress, RetryBudget
from tercet_lab.sim import SimEngine
from tests.unit.lab.sim.models import engines_of, is_empty, request_of
from tests.virtual_time import in_virtual_time

from .conftest import Engine, LiveRouter, counted

ANSWER = [100, 101, 102]
REQUEST = Request(seq_id="s", prompt=(1, 2, 3))

# ---- the decision --------------------------------------------------------------------------------------------


@given(
    retries=st.integers(0, 5),
    within=st.floats(0.1, 100),
    events=st.lists(st.tuples(st.sampled_from(["token", "failure"]), st.floats(0, 50)), max_size=30),
)
def test_attempts_stay_within_the_budget(retries: int, within: float, events: list[tuple[str, float]]) -> None:
    now, last, given_up = 0.0, 0.0, False
    sequence = RunningSequence(REQUEST, "p", RetryBudget(retries=retries, within_s=within), now)
    tokens: list[int] = []
    in_vain = 0
    for what, seconds in events:
        now += seconds
        if what == "token":
            sequence.record(Output((len(tokens),)), now)
            tokens.append(len(tokens))
            last, in_vain = now, 0
            continue
        before = sequence.attempt
        retry = sequence.next_attempt(now)
        if retry is None:
            given_up = True
            assert in_vain == retries or now + 0.2 * 2**in_vain - last > within
            assert sequence.attempt == before
        else:
            in_vain += 1
            assert sequence.attempt == before + 1
            assert in_vain <= retries
            assert now + retry.pause - last <= within
            assert retry.pause >= 0
            assert retry.output == tuple(tokens)
            assert retry.request.seq_id == f"s.{sequence.attempt}"
    assert sequence.tokens == tokens
    assert sequence.answered is bool(tokens)
    assert given_up or sequence.attempt == sum(what == "failure" for what, _ in events)


def test_the_first_retry_begins_at_once_and_later_ones_wait_twice_as_long() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(retries=4), 0.0)
    retries = [sequence.next_attempt(0.0) for _ in range(5)]
    assert [retry and retry.pause for retry in retries] == [0.0, 0.2, 0.4, 0.8, None]


def test_any_number_of_losses_is_survived_with_progress_between_them() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(retries=1), 0.0)
    for loss in range(100):
        sequence.record(Output((loss,)), float(loss))
        retry = sequence.next_attempt(float(loss))
        assert retry is not None
        assert (retry.pause, retry.request.seq_id) == (0.0, f"s.{loss + 1}")
    assert sequence.next_attempt(100.0) is None


def test_an_empty_output_is_no_sign_of_life() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(within_s=1.0), 0.0)
    sequence.record(Output(()), 0.9)
    assert sequence.next_attempt(1.5) is None


def test_what_has_ended_is_not_tried_again() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(), 0.0)
    sequence.record(Output((1,), "stop"), 0.5)
    assert sequence.ended
    assert sequence.next_attempt(0.5) is None


def test_attempts_that_no_engine_took_are_free_while_one_may_come_back() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(retries=1), 0.0, wait_s=30.0)
    for now in (0.0, 10.0, 29.0):
        assert sequence.next_attempt(now, taken=False) is not None
    assert sequence.next_attempt(29.5) is not None  # the one that is counted
    assert sequence.next_attempt(40.0, taken=False) is not None  # the time has begun anew
    assert sequence.next_attempt(71.0, taken=False) is None
    assert sequence.next_attempt(71.0) is None


def test_no_attempt_is_free_where_none_is_wanted_or_nobody_waits() -> None:
    assert RunningSequence(REQUEST, "p", RetryBudget(retries=0), 0.0, wait_s=30.0).next_attempt(0.0, False) is None
    sequence = RunningSequence(REQUEST, "p", RetryBudget(retries=1), 0.0)
    assert sequence.next_attempt(0.0, taken=False) is not None
    assert sequence.next_attempt(0.0, taken=False) is None


def test_free_attempts_are_not_made_without_a_pause() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(retries=1), 0.0, wait_s=30.0)
    retries = [sequence.next_attempt(0.0, taken=False) for _ in range(6)]
    assert [retry and retry.pause for retry in retries] == [0.0, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_times_to_the_first_token_and_between_two() -> None:
    sequence = RunningSequence(REQUEST, "p", RetryBudget(), 10.0)
    assert (sequence.ttft, sequence.tpot) == (None, None)
    sequence.record(Output((1,)), 12.0)
    assert (sequence.ttft, sequence.tpot) == (2.0, None)
    sequence.record(Output((2, 3)), 13.0)
    assert (sequence.ttft, sequence.tpot) == (2.0, 0.5)


def generation_on(name: str) -> Any:
    return SimpleNamespace(engine=SimpleNamespace(name=name))


def test_running_sequences_are_found_by_id_and_by_engine_until_they_end() -> None:
    sequences = RunningSequences()
    a, b = (RunningSequence(Request(seq_id=name, prompt=(1,)), "p", RetryBudget(), 0.0) for name in "ab")
    with sequences.running(a), sequences.running(b):
        a.generation = generation_on("x")
        assert [*sequences] == [a, b]
        assert (sequences.on("x"), sequences.on("y")) == ([a], [])
        a.generation = generation_on("y")  # another attempt
        assert (sequences.on("x"), sequences.on("y")) == ([], [a])
        assert sequences.named("b") is b
        with pytest.raises(UnknownSequence):
            sequences.named("c")
    assert len(sequences) == 0


# ---- what clients see ----------------------------------------------------------------------------------------

REFUSALS = [
    ("d", "prep_recv", NoSpace("full")),
    ("d", "prep_recv", EngineUnreachable("gone")),
    ("p", "remote_send", TransferFailed("lost")),
    ("p", "remote_send", LeaseEnded("over")),
    ("p", "remote_send", EngineUnreachable("gone")),
    ("p", "remote_send", LayoutMismatch("block sizes")),
    ("d", "start_generate", EngineUnreachable("gone")),
    ("d", "start_generate", EngineError("out of memory")),
]


@pytest.mark.parametrize(("engine", "verb", "error"), REFUSALS)
async def test_a_verb_that_fails(router: LiveRouter, engine: str, verb: str, error: TercetError) -> None:
    router.engine(engine).failures[verb] = error
    assert await router.ask() == ("disaggregated -> data_parallel", ANSWER)
    other = router.engine("d" if engine == "p" else "p")
    assert other.verbs[-1] == "start_generate"  # who failed is not asked again while there are others
    stage = "after_first_token" if verb == "start_generate" else "before_first_token"
    assert counted("tercet_retries_total", code=error.code, stage=stage) == 1
    assert await router.has_everything_back()


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("program", ["disaggregated", "data_parallel", "balanced"])
async def test_an_engine_that_dies_after_tokens(router: LiveRouter, program: str, after: int) -> None:
    router.engine("p").failures["start_generate"] = EngineUnreachable("never asked first")
    await router.ask({"x-tercet-program": "data_parallel"})  # p counts as unreachable now
    router.engine("p").failures.clear()
    router.engine("d").fail_after, router.engine("d").failures["stream"] = after, EngineUnreachable("gone")
    served_by, tokens = await router.ask({"x-tercet-program": program})
    assert tokens == ANSWER
    assert served_by == ("data_parallel" if program == "data_parallel" else f"{program} -> data_parallel")
    assert router.engine("p").calls[-1] == ("start_generate", 0, tuple(ANSWER[:after]))
    assert await router.has_everything_back()


@pytest.mark.parametrize("tokens", [(), (100,), (100, 101)])
async def test_an_engine_that_breaks_off(router: LiveRouter, tokens: tuple[int, ...]) -> None:
    router.engine("d").breaks_off = Output(tokens, "abort")
    router.engine("p").failures["remote_send"] = TransferFailed("lost")
    router.engine("p").failures["prep_recv"] = NoSpace("full")
    router.fleet.member("p").role = "prefill"
    router.fleet.drain("p")
    asking = asyncio.ensure_future(router.ask({"x-tercet-program": "data_parallel"}))
    while not router.engine("d").calls:
        await asyncio.sleep(0)
    router.fleet.drain("p", draining=False)
    assert await asking == ("data_parallel", ANSWER)
    assert router.engine("p").calls[-1] == ("start_generate", 0, tokens)


async def test_when_the_budget_is_spent_the_client_gets_what_the_engine_said(router: LiveRouter) -> None:
    for name in "pd":
        router.engine(name).breaks_off = Output((), "abort")
    request = Request(seq_id="s", prompt=tuple(range(100)))
    outputs = [output async for output in router.service.run(request, Trace())]
    assert [output.finish_reason for output in outputs] == [None, "abort"]
    assert await router.has_everything_back()


async def test_what_the_client_did_wrong_is_tried_nowhere_else(router: LiveRouter) -> None:
    for name in "pd":
        router.engine(name).failures["start_generate"] = BadRequest("temperature: too hot", "temperature")
    with pytest.raises(BadRequest, match="too hot"):
        await router.ask({"x-tercet-program": "data_parallel"})
    assert sum(len(router.engine(name).calls) for name in "pd") == 1


async def test_no_retries_if_none_are_wanted(router: LiveRouter, metrics: Metrics) -> None:
    router.service = Service(router.fleet, "data_parallel", {}, metrics, retries=RetryBudget(retries=0))
    for name in "pd":
        router.engine(name).failures["start_generate"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await router.ask()
    assert sum(len(router.engine(name).calls) for name in "pd") == 1


async def test_another_attempt_has_an_id_of_its_own_and_asks_for_no_prompt_logprobs_twice(router: LiveRouter) -> None:
    seen: list[Request] = []
    for name in "pd":
        engine = router.engine(name)
        engine.on_request = seen.append
        engine.fail_after, engine.failures["stream"] = 1, EngineUnreachable("gone")
    with pytest.raises(EngineUnreachable):
        await router.ask(prompt_logprobs=2, max_tokens=5)
    assert [request.seq_id for request in seen] == ["s1", "s1.1", "s1.2"]
    assert ["prompt_logprobs" in request.sampling_params for request in seen] == [True, False, False]


async def test_of_those_that_are_left_one_that_decodes_goes_on(router: LiveRouter) -> None:
    """Prefill engines look idle, since sequences stay with them for their prompts only."""
    router.engine("d").failures["start_generate"] = EngineUnreachable("gone")
    third = router.engines["http://e"] = Engine("e")
    await router.membership.enter(EngineAddress("e", "http://e", "decode"))
    router.fleet.member("e").in_flight = 9
    assert (await router.ask())[1] == ANSWER
    assert "start_generate" in third.verbs
    assert "start_generate" not in router.engine("p").verbs


# ---- everything comes back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fail", ["prefill", "decode", "stream"])
async def test_cancelled_at_every_step(router: LiveRouter, fail: str) -> None:
    """The client leaves after 0, 1, 2, ... turns of the event loop, in the midst of retries too."""
    prefill, decode = router.engine("p"), router.engine("d")
    if fail == "prefill":
        prefill.failures["remote_send"] = TransferFailed("lost")
    elif fail == "decode":
        decode.failures["start_generate"] = EngineError("broken")
    else:
        decode.fail_after, decode.failures["stream"] = 2, EngineUnreachable("gone")
    turns = 0
    while True:
        asking = asyncio.ensure_future(router.ask())
        for _ in range(turns):
            await asyncio.sleep(0)
        if asking.done():
            break
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await router.has_everything_back()
        assert counted("tercet_sequences_running") == 0
        router.fleet.member("d").reachable = True
        turns += 1
    assert asking.result()[1] == ANSWER
    assert turns >= 5


def service_over(engines: list[SimEngine], program: str, metrics: Metrics) -> tuple[Service, EngineFleet]:
    roles = ["prefill", "decode", "decode"]
    fleet = EngineFleet([Member(e.name, "", role, e) for e, role in zip(engines, roles, strict=True)])  # type: ignore[arg-type]
    return Service(fleet, program, {}, metrics), fleet


async def answer(service: Service, request: Request) -> list[int]:
    return [token async for output in service.run(request, Trace()) for token in output.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["disaggregated", "balanced", "data_parallel"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@in_virtual_time
async def test_an_engine_killed_at_any_moment_costs_no_token(program: str, victim: int, metrics: Metrics) -> None:
    """A hundred moments from the request's arrival to its end, in virtual time."""

    request = request_of("s", length=200, max_tokens=8)
    service, _ = service_over(engines_of("p", "d", "e"), program, metrics)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    expected = await answer(service, request)
    whole = loop.time() - begun
    for moment in range(100):
        engines = engines_of("p", "d", "e")
        service, fleet = service_over(engines, program, metrics)
        asking = asyncio.ensure_future(answer(service, request))
        await asyncio.sleep(whole * moment / 100)
        engines[victim].fail()
        assert await asking == expected
        assert all(member.in_flight == 0 for member in fleet.members)
        engines[victim].recover()
        await asyncio.sleep(1)
        assert all(is_empty(engine) for engine in engines)


@in_virtual_time
async def test_all_engines_dead_is_an_error_soon(metrics: Metrics) -> None:
    engines = engines_of("p", "d", "e")
    service, fleet = service_over(engines, "disaggregated", metrics)
    asking = asyncio.ensure_future(answer(service, request_of("s", max_tokens=100)))
    await asyncio.sleep(0.5)
    for engine in engines:
        engine.fail()
    with pytest.raises(EngineUnreachable):
        await asking
    assert all(member.in_flight == 0 for member in fleet.members)


async def test_while_no_engine_answers_a_sequence_waits_for_one(router: LiveRouter, metrics: Metrics) -> None:
    router.service = Service(
        router.fleet, "data_parallel", {}, metrics, retries=RetryBudget(retries=1), wait_for_engine=60
    )
    for name in "pd":
        router.engine(name).failures["start_generate"] = EngineUnreachable("gone")
        router.fleet.member(name).reachable = False
    asking = asyncio.ensure_future(router.ask())
    while not (router.engine("p").calls or router.engine("d").calls):
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not asking.done()
    router.engine("d").failures.clear()
    router.fleet.member("d").reachable = True  # as the watch finds out
    assert (await asking)[1] == ANSWER


@pytest.mark.slow
async def test_engines_that_were_not_reached_do_not_spend_the_budget(router: LiveRouter, metrics: Metrics) -> None:
    """Four of six are gone, and nobody knows it yet."""
    router.service = Service(
        router.fleet, "data_parallel", {}, metrics, retries=RetryBudget(retries=1), wait_for_engine=60
    )
    for name in "efgh":
        router.engines[f"http://{name}"] = Engine(name)
        await router.membership.enter(EngineAddress(name, f"http://{name}", "decode"))
    for name in "dpefg":
        router.engine(name).failures["start_generate"] = EngineNotReached("nobody listens there")
    router.fleet.member("h").in_flight = 9  # so it is asked last
    assert (await router.ask())[1] == ANSWER


@pytest.mark.slow
async def test_an_engine_that_stood_still_before_it_was_asked_does_not_spend_the_budget(
    router: LiveRouter, metrics: Metrics
) -> None:
    router.service = Service(
        router.fleet, "data_parallel", {}, metrics, retries=RetryBudget(retries=1), wait_for_engine=60
    )
    standing = ["d", "e", "f"]
    assert (await router.ask())[1] == ANSWER  # by p, whose turn comes last now
    for name in "ef":
        router.engines[f"http://{name}"] = Engine(name)
        await router.membership.enter(EngineAddress(name, f"http://{name}", "decode"))
    for name in standing:
        router.fleet.health.heard(name, stalled_s=3.0)
        router.engine(name).pause.clear()
    asking = asyncio.ensure_future(router.ask())
    while standing:
        while not (stuck := next((name for name in standing if router.engine(name).running), "")):
            await asyncio.sleep(0.001)
        standing.remove(stuck)
        router.fleet.health.lose(stuck, "no progress")
    assert (await asking)[1] == ANSWER
    assert router.engine("p").verbs == ["start_generate"] * 2


@pytest.mark.slow
async def test_it_does_not_wait_for_ever(router: LiveRouter, metrics: Metrics) -> None:
    router.service = Service(router.fleet, "data_parallel", {}, metrics, wait_for_engine=0.2)
    for name in "pd":
        router.engine(name).failures["start_generate"] = EngineUnreachable("gone")
        router.fleet.member(name).reachable = False
    with pytest.raises(EngineUnreachable):
        await router.ask()
    assert await router.has_everything_back()


# ---- a role that nobody has ----------------------------------------------------------------------------------


async def test_without_a_role_requests_are_served_on_what_is_left_and_in_roles_when_it_is_back(
    router: LiveRouter,
) -> None:
    for gone, left in (("p", "d"), ("d", "p")):
        before = router.engine(gone).verbs
        await router.shared.change(lambda state, gone=gone: state.with_draining(gone, True))
        assert (await router.ask(max_tokens=3))[1] == ANSWER
        assert (router.engine(gone).verbs, router.engine(left).verbs[-1]) == (before, "start_generate")
        await router.shared.change(lambda state, gone=gone: state.with_draining(gone, False))
        assert await router.ask(max_tokens=3) == ("disaggregated", ANSWER)
        assert (router.engine("p").verbs[-1], router.engine("d").verbs[-1]) == ("remote_send", "start_generate")


@pytest.mark.parametrize("gone", ["p", "d"])
async def test_without_a_role_requests_are_refused_if_that_is_wanted(router: LiveRouter, gone: str) -> None:
    router.fleet.picking.without_role = "refuse"
    await router.shared.change(lambda state: state.with_draining(gone, True))
    began = asyncio.get_running_loop().time()
    with pytest.raises(RoleUnavailable):
        await router.ask(max_tokens=3)
    assert asyncio.get_running_loop().time() - began < 5, "it does not wait for an engine that would not be asked"
    await router.shared.change(lambda state: state.with_draining(gone, False))
    assert (await router.ask(max_tokens=3))[1] == ANSWER
    assert await router.has_everything_back()


async def test_what_runs_goes_on_even_if_new_requests_are_refused(router: LiveRouter) -> None:
    router.fleet.picking.without_role = "refuse"
    router.engine("d").fail_after, router.engine("d").failures["stream"] = 2, EngineUnreachable("gone")
    assert (await router.ask(max_tokens=3))[1] == ANSWER


# ---- structured outputs ----------------------------------------------------------------------------------------------


async def ended(router: LiveRouter, **params: Any) -> list[str | None]:
    """How the answer to a request with these parameters ends, where the engine asked first does not serve it."""
    request = Request(seq_id="s", prompt=(1, 2, 3), sampling_params=params)
    return [output.finish_reason async for output in router.service.run(request, Trace())]


@pytest.mark.parametrize("after", [0, 2])
async def test_a_structure_that_an_engine_refuses_is_its_clients_error_with_the_reason(
    router: LiveRouter, after: int
) -> None:
    """Another engine would refuse it, too: it is not asked, and no program is blamed."""
    refusal = BadRequest("structured_outputs: no text matches this structure", "structured_outputs")
    router.engine("d").fail_after, router.engine("d").failures["stream"] = after, refusal
    with pytest.raises(BadRequest, match="no text matches") as refused:
        await ended(router, structured_outputs={"regex": "(a"}, max_tokens=3)
    assert refused.value.param == "structured_outputs"
    assert "start_generate" not in router.engine("p").verbs
    assert not router.service.routing.failures
    assert await router.has_everything_back()


async def test_a_structure_that_an_engine_has_no_time_for_goes_elsewhere_and_then_is_a_503(router: LiveRouter) -> None:
    busy = GrammarsBusy("structured_outputs: this structure could not be tried")
    router.engine("d").failures["start_generate"] = busy
    assert (await ended(router, structured_outputs={"regex": "a+"}))[-1] == "length"
    for name in "dp":
        router.engine(name).failures["start_generate"] = from_wire(500, busy.to_wire())
    with pytest.raises(GrammarsBusy) as refused:
        await ended(router, structured_outputs={"regex": "a+"})
    assert (refused.value.status, refused.value.retry_after) == (503, 10)
    assert await router.has_everything_back()


@pytest.mark.parametrize("broken_off", [Output((100,), "error"), Output((), "error"), Output((), "abort")])
async def test_a_structure_that_an_engine_broke_off_goes_on_elsewhere(router: LiveRouter, broken_off: Output) -> None:
    router.engine("d").breaks_off = broken_off
    assert (await ended(router, structured_outputs={"regex": "a+"}))[-1] == "length"
    assert await router.has_everything_back()
