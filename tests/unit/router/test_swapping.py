"""Programs that change and fail while requests run: no request fails for it, and all that was taken comes back."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest

from tercet.protocol import BadRequest, EngineUnreachable
from tercet.router.serve.plans import Plan, Rule, Share
from tests.long_runs import FULL

from .conftest import LiveRouter, counted

ANSWER = [100, 101, 102]
SWAPS = 200 if FULL else 20


async def test_new_requests_get_the_new_program_and_old_ones_keep_theirs(router: LiveRouter, programs: str) -> None:
    router.engine("d").pause.clear()
    old = asyncio.ensure_future(router.ask())
    while not router.engine("d").calls:
        await asyncio.sleep(0)
    await router.use(Plan(program=f"{programs}:marked"))
    assert await router.ask() == (f"{programs}:marked", [7, 7, 7])
    assert not old.done()
    router.engine("d").pause.set()
    assert await old == ("disaggregated", ANSWER)
    assert counted("tercet_program_version") == 2


@pytest.mark.parametrize("what", ["missing", "no_generator", "good", ""])
async def test_a_program_that_cannot_be_loaded_changes_nothing(router: LiveRouter, programs: str, what: str) -> None:
    args = {"nonsense": 1} if what == "good" else {}
    with pytest.raises(BadRequest, match="program"):
        await router.use(Plan(program=f"{programs}:{what}", args=args))
    assert router.service.routing.current.number == 1
    assert router.service.wanted.program == "disaggregated"
    assert await router.ask() == ("disaggregated", ANSWER)


@pytest.mark.parametrize("text", ["syntax error(", "import nowhere_to_be_found", "raise SystemExit(1)", "1 / 0"])
async def test_a_file_that_fails_when_it_is_loaded_changes_nothing(
    router: LiveRouter, tmp_path: Path, text: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(BadRequest, match=r"broken\.py failed to load"):
        await router.use(Plan(program=f"{tmp_path / 'broken.py'}:main"))
    assert await router.ask() == ("disaggregated", ANSWER)


BROKEN = ["raises", "exits", "yields_none", "yields_nothing", "wrong_picker"]


@pytest.mark.parametrize("what", BROKEN)
async def test_a_failing_program_is_replaced_and_no_client_notices(
    router: LiveRouter, programs: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tercet")
    name = f"{programs}:{what}"
    await router.use(Plan(program=name))
    for expected in (1, 2, 0):
        assert await router.ask() == (f"{name} -> data_parallel", ANSWER)
        assert router.service.routing.failures.get(name, 0) == expected
    assert await router.ask() == ("disaggregated", ANSWER)
    returned = router.service.routing.returned
    assert returned is not None
    assert (returned.from_version, returned.to_version, returned.program, returned.failures) == (2, 1, name, 3)
    assert any(
        record.message.startswith("program_returned: version 2 is replaced by version 1,") for record in caplog.records
    )
    assert counted("tercet_program_failures_total", program=name) == 3
    assert counted("tercet_program_returns_total", program=name) == 1
    assert counted("tercet_fallbacks_total", program=name, code="program_failed") == 3
    assert counted("tercet_program_version") == 1
    assert await router.has_everything_back()


async def test_with_nothing_to_return_to_one_engine_serves_on(router: LiveRouter, programs: str) -> None:
    routing = router.service.routing
    await router.use(Plan(program=f"{programs}:raises"))
    await router.use(Plan(program=f"{programs}:exits"))
    for _ in range(6):
        assert (await router.ask())[1] == ANSWER
    assert routing.current.number == 1
    router.engine("d").failures["prep_recv"] = BadRequest("no", "pick")  # now the first one fails, with none before it
    for _ in range(5):
        assert await router.ask() == ("disaggregated -> data_parallel", ANSWER)
    assert routing.current.number == 1
    assert routing.failures == {"disaggregated": 5}


@pytest.mark.parametrize("param", ["end", "begin"])
async def test_a_range_that_a_program_computes_is_its_own_fault(router: LiveRouter, param: str) -> None:
    """Else all clients would get an error about a field that they do not know, for ever."""
    router.engine("d").failures["prep_recv"] = BadRequest(f"{param}: 15 is outside the prompt", param)
    await router.use(Plan(program="disaggregated"))
    for _ in range(2):
        assert await router.ask() == ("disaggregated -> data_parallel", ANSWER)
    assert router.service.routing.failures == {"disaggregated": 2}


async def test_what_the_client_or_the_fleet_did_is_not_the_programs_fault(router: LiveRouter, programs: str) -> None:
    await router.use(Plan(program=f"{programs}:refuses"))
    for _ in range(5):
        with pytest.raises(BadRequest, match="not with me"):
            await router.ask()
    await router.use(Plan(program=f"{programs}:no_space"))
    for _ in range(5):
        assert await router.ask() == (f"{programs}:no_space -> data_parallel", ANSWER)
    assert router.service.routing.current.number == 3
    assert counted("tercet_fallbacks_total", program=f"{programs}:no_space", code="no_space") == 5


async def test_a_program_that_fails_after_the_first_token_gets_the_blame_and_no_client_notices(
    router: LiveRouter, programs: str
) -> None:
    name = f"{programs}:breaks_off"
    await router.use(Plan(program=name))
    for _ in range(3):
        assert await router.ask() == (f"{name} -> data_parallel", ANSWER)
    assert await router.ask() == ("disaggregated", ANSWER)
    assert counted("tercet_retries_total", code="program_failed", stage="after_first_token") == 3


async def test_a_split_that_fails_in_one_part_is_given_up_as_a_whole(router: LiveRouter, programs: str) -> None:
    split = (Share(program="data_parallel", weight=1), Share(program=f"{programs}:raises", weight=1, name="trial"))
    await router.use(Plan(split=split))
    version = router.service.routing.current
    asked = 0
    while router.service.routing.current is version:
        asked += 1
        assert (await router.ask())[1] == ANSWER
        assert asked < 200
    assert router.service.routing.returned is not None
    assert router.service.routing.returned.program == "trial"


async def test_rules_and_the_clients_own_choice(router: LiveRouter, programs: str) -> None:
    rules = (
        Rule(program=f"{programs}:marked", name="marked", header="x-team", value="red"),
        Rule(program="data_parallel", model="big"),
    )
    await router.use(Plan(program="disaggregated", rules=rules))
    assert await router.ask({"x-team": "red"}) == ("marked", [7, 7, 7])
    assert (await router.ask({"x-team": "blue"}))[0] == "disaggregated"
    assert (await router.ask(model="big"))[0] == "data_parallel"
    assert (await router.ask({"x-team": "blue", "x-tercet-program": "marked"}))[0] == "marked"
    assert (await router.ask({"x-tercet-program": "balanced"}))[0] == "balanced"
    with pytest.raises(BadRequest, match="marked"):
        await router.ask({"x-tercet-program": f"{programs}:marked"})


async def test_programs_with_their_parameters_are_told_apart_in_the_metrics(router: LiveRouter, programs: str) -> None:
    split = (
        Share(program=f"{programs}:good", name="a", args={"by": "round_robin"}),
        Share(program=f"{programs}:good", name="b", args={"by": "least_loaded"}),
    )
    await router.use(Plan(split=split))
    for _ in range(100):
        await router.ask()
    found = [counted("tercet_sequences_total", program=name) for name in "ab"]
    assert sum(found) == 100
    assert min(found) > 0


async def test_a_program_that_fights_its_cancellation_is_cancelled(router: LiveRouter, programs: str) -> None:
    await router.use(Plan(program=f"{programs}:will_not_be_cancelled"))
    for name in ("p", "d"):
        router.engine(name).pause.clear()
    asking = asyncio.ensure_future(router.ask())
    while not any(engine.running for engine in router.engines.values()):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await router.has_everything_back()
    assert router.service.routing.failures == {}
    assert counted("tercet_sequences_running") == 0


@pytest.mark.slow
async def test_swaps_under_load(router: LiveRouter, programs: str, caplog: pytest.LogCaptureFixture) -> None:
    """Clients ask all the time, some leave; programs and the fleet change; some programs are broken."""
    caplog.set_level(logging.CRITICAL, logger="tercet.router")
    rng = random.Random(7)
    sound = [f"{programs}:good", "balanced", "data_parallel", "disaggregated"]
    served, left, done = 0, 0, asyncio.Event()

    async def client() -> None:
        nonlocal served, left
        while not done.is_set():
            asking = asyncio.ensure_future(router.ask())
            if rng.random() < 0.3:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                asking.cancel()
            try:
                assert (await asking)[1] == ANSWER
                served += 1
            except asyncio.CancelledError:
                left += 1

    clients = [asyncio.ensure_future(client()) for _ in range(20)]
    for number in range(SWAPS):
        broken = f"{programs}:{rng.choice(BROKEN)}"
        plans = [
            Plan(program=rng.choice(sound)),
            Plan(program=broken),
            Plan(split=(Share(program=rng.choice(sound)), Share(program=broken, weight=rng.random()))),
        ]
        await router.use(plans[number % 3])
        if number % 10 == 0:
            router.fleet.drain("d", draining=number % 20 == 0)
        before = served
        while served < before + 5:
            await asyncio.sleep(0)
    done.set()
    for result in await asyncio.gather(*clients, return_exceptions=True):
        assert result is None
    assert left > SWAPS // 10
    assert served >= 5 * SWAPS
    assert await router.has_everything_back()
    assert counted("tercet_sequences_running") == 0
    assert router.service.routing.current.number <= SWAPS + 1


@pytest.mark.slow
async def test_unreachable_engines_are_no_reason_to_return(router: LiveRouter, programs: str) -> None:
    await router.use(Plan(program=f"{programs}:good"))
    for name in ("p", "d"):
        router.engine(name).failures["start_generate"] = EngineUnreachable("gone")
    for _ in range(5):
        with pytest.raises(EngineUnreachable):
            await router.ask()
    assert router.service.routing.current.number == 2
