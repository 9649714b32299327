"""A decode engine has others prefill: who is asked, what is told of it, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from tercet.protocol import BadRequest, DeadlineExceeded, EngineError, EngineUnreachable
from tercet.protocol.headers import PREFILLER_HEADER
from tercet.protocol.names import AllowedPrefillers
from tercet.protocol.spans import VerbTrace
from tercet.settings.process_settings import PrefillBudget
from tercet.wire.client.remote_prefill import PrefillAttempts
from tercet_lab.sim import EngineOptions, SimEngine
from tercet_lab.sim.sim_server import ServerConfig, serving
from tests.clock import Clock
from tests.longest_wait import until

from .engines import BUDGET, PREFILLER, PROFILE, config_of, prompt_of

NOBODY = "127.0.0.1:1"


class World:
    """A decode engine ``d`` and prefill engines by name, in this process."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.engines: dict[str, SimEngine] = {}
        self.addresses: dict[str, str] = {}

    async def enter(self, stack: AsyncExitStack, config: ServerConfig) -> None:
        self.engines[config.name] = await stack.enter_async_context(serving(config))
        self.addresses[config.name] = config.url.removeprefix("http://")

    async def ask(self, number: int, *named: str, **fields: Any) -> tuple[int, Any]:
        body = {"model": "m", "prompt": prompt_of(number), "max_tokens": 3, **fields}
        headers = {PREFILLER: ",".join(self.addresses.get(name, name) for name in named), "x-tercet-trace": "true"}
        url = f"http://{self.addresses['d']}/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def empty(self) -> bool:
        found = [await engine.status() for engine in self.engines.values()]
        return not any(each.leases or each.sends or each.running or each.waiting for each in found)


@asynccontextmanager
async def world(*configs: ServerConfig) -> AsyncGenerator[World]:
    async with AsyncExitStack() as stack:
        made = World(await stack.enter_async_context(aiohttp.ClientSession()))
        for config in configs or (config_of("d"), config_of("p")):
            await made.enter(stack, config)
        yield made
        await until(made.empty)


def verbs(trace: Any) -> list[tuple[str, str]]:
    return [(event["verb"], event.get("code", "")) for event in trace["events"]]


async def test_the_named_engine_prefills() -> None:
    async with world() as found:
        status, said = await found.ask(1, "p")
        assert (status, said["tercet"]["program"]) == (200, "disaggregated")
        assert verbs(said["tercet"]) == [("prep_recv", ""), ("remote_send", "")]
        assert said["tercet"]["events"][1]["end"] == 199
        assert found.engines["p"].counters.prefill_tokens == 199
        assert not found.engines["d"].counters.prefill_tokens
        # What is here already is not fetched again.
        assert verbs((await found.ask(1, "p"))[1]["tercet"])[:1] == [("prep_recv", "")]


@pytest.mark.slow
async def test_the_next_one_is_asked_and_then_nobody() -> None:
    async with world() as found:
        _, said = await found.ask(1, NOBODY, "p")
        assert verbs(said["tercet"]) == [("prep_recv", ""), ("fallback", "engine_unreachable"), ("remote_send", "")]
        status, said = await found.ask(2, NOBODY)
        assert (status, said["tercet"]["program"]) == (200, "disaggregated -> data_parallel")
        assert "was lost a moment ago" in said["tercet"]["events"][-1]["reason"]


async def test_a_stranger_is_refused_and_the_header_named() -> None:
    async with world() as found:
        status, said = await found.ask(1, "192.0.2.1:80")
        assert (status, said["error"]["param"]) == (400, PREFILLER)


async def test_without_an_allow_list_the_header_is_ignored() -> None:
    async with world(config_of("d", prefill_hosts=""), config_of("p")) as found:
        status, said = await found.ask(1, "p")
        assert (status, said["tercet"]["events"]) == (200, [])
        assert not found.engines["p"].counters.prefill_tokens


async def test_kv_of_other_weights_is_not_taken() -> None:
    other = msgspec.structs.replace(PROFILE, model=msgspec.structs.replace(PROFILE.model, name="other"))
    changed = msgspec.structs.replace(config_of("p"), profile=other)
    async with world(config_of("d"), changed) as found:
        status, said = await found.ask(1, "p")
        assert status == 200
        assert "their weights differ" in said["tercet"]["events"][-1]["reason"]


async def test_a_full_engine_prefills_as_it_can() -> None:
    tight = config_of("d", options=EngineOptions(stream_every=1, max_lease_share=0.0))
    async with world(tight, config_of("p")) as found:
        status, said = await found.ask(1, "p")
        assert (status, verbs(said["tercet"])) == (200, [("fallback", "no_space")])


@pytest.mark.slow
async def test_the_time_of_others_is_bounded() -> None:
    slow = config_of("p", options=EngineOptions(stream_every=1, prefill_scale=10))
    brief = config_of("d", prefill_budget=PrefillBudget(timeout_s=0.3, stuck_after_s=5))
    async with world(brief, slow) as found:
        status, said = await found.ask(1, "p")
        assert (status, verbs(said["tercet"])[-1]) == (200, ("fallback", "deadline_exceeded"))


@pytest.mark.slow
async def test_a_client_that_leaves_ends_what_runs_for_it() -> None:
    slow = config_of("p", options=EngineOptions(stream_every=1, prefill_scale=10))
    async with world(config_of("d"), slow) as found:
        asking = asyncio.create_task(found.ask(1, "p"))

        async def is_sent() -> bool:
            return bool((await found.engines["p"].status()).running)

        await until(is_sent)
        asking.cancel()
        await asyncio.wait({asking})


# ---- without engines -------------------------------------------------------------------------------------------


async def silent() -> None:
    await asyncio.Event().wait()


async def well() -> None:
    pass


async def test_silence_is_a_failure_and_who_was_lost_has_to_answer_first() -> None:
    clock = Clock()
    attempts = PrefillAttempts(PrefillBudget(timeout_s=60, stuck_after_s=0.01), clock)
    begun = list[str]()

    async def work() -> str:
        begun.append("work")
        await asyncio.sleep(0)
        return "done"

    async def stand_still() -> str:
        begun.append("stand still")
        await silent()
        return "never"

    with pytest.raises(EngineUnreachable, match="sent nothing"):
        await attempts.watched("p", stand_still, silent)
    with pytest.raises(EngineUnreachable, match="lost a moment ago"):
        await attempts.watched("p", work, well)
    clock.now += 10
    assert begun == ["stand still"]
    assert await attempts.watched("p", work, well) == "done"
    assert await attempts.watched("p", work, silent) == "done"


@pytest.mark.slow
async def test_what_fails_on_both_sides_is_raised_once() -> None:
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    attempts = PrefillAttempts(PrefillBudget(timeout_s=60, stuck_after_s=0.01))

    async def ends_in_an_error() -> str:
        try:
            await silent()
        except asyncio.CancelledError:
            raise EngineError("broken off") from None
        return "never"

    with pytest.raises(EngineUnreachable, match="sent nothing"):
        await attempts.watched("p", ends_in_an_error, silent)
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints


async def test_what_one_fails_by_is_told_and_the_last_failure_is_the_requests() -> None:
    attempts, trace = PrefillAttempts(BUDGET), VerbTrace()
    failures = {"a": EngineError("broken"), "b": BadRequest("no")}

    async def ask(host: str) -> str:
        if host in failures:
            raise failures[host]
        return host

    assert await attempts.first_of(["a", "b", "c"], "s", trace, ask) == "c"
    assert [event.engine for event in trace.events] == ["a", "b"]
    with pytest.raises(BadRequest, match="no"):
        await attempts.first_of(["a", "b"], "s", trace, ask)


async def test_all_of_them_share_one_budget() -> None:
    attempts, trace = PrefillAttempts(PrefillBudget(timeout_s=0.05, stuck_after_s=5)), VerbTrace()
    asked = list[str]()

    async def ask(host: str) -> str:
        asked.append(host)
        await silent()
        return host

    with pytest.raises(DeadlineExceeded, match="a has not prefilled"):
        await attempts.first_of(["a", "b"], "s", trace, ask)
    assert asked == ["a"]


# The allow-list: which engines a header may name, however it is written.


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ("10.0.0.0/8:8000", "10.1.2.3:8000"),
        ("10.0.0.5:8000-8010", "10.0.0.5:8010"),
        ("127.0.0.1:*", "127.0.0.1:1"),
        ("[fd00::]/8:8000", "[fd12::1]:8000"),
        ("[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
        ("*.prefill.svc:8000", "p-0.prefill.svc:8000"),
        ("*.prefill.svc:8000", "P-0.Prefill.SVC:8000"),
        ("other:1, p0:8000", " p0:8000 "),
        ("10.0.0.0/8:8000", "[::ffff:10.0.0.1]:8000"),
    ],
)
def test_allowed(patterns: str, named: str) -> None:
    (found,) = AllowedPrefillers(patterns, "prefill-hosts").named(named)
    assert found == named.strip().lower()


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ("10.0.0.0/8:8000", "11.0.0.1:8000"),
        ("10.0.0.0/8:8000", "10.0.0.1:8001"),
        ("10.0.0.0/8:8000", "10.0.0.1"),
        ("10.0.0.0/8:8000", "10.0.0.1:8000,192.168.0.1:8000"),
        ("10.0.0.0/8:8000", "ten.example:8000"),
        ("*.svc:8000", "10.0.0.1:8000"),
        ("*.svc:8000", "evil.example/x.svc:8000"),
        ("*.svc:8000", "user@p0.svc:8000"),
        ("*.svc:8000", "p0.svc:8000/path"),
        ("*:*", "2130706433:80"),
        ("*:*", "0x7f.1:80"),
        ("*:*", "0x7f000001:80"),
        ("*:*", "010.0.0.1:80"),
        ("*:*", "http://p0:80"),
        ("*:*", "p0:0"),
        ("*:*", "p0:65536"),
        ("*:*", "p0:000001" + 5000 * "1"),
        ("*:*", "p0:٣"),
        ("*:*", "p0 :80"),
        ("*:*", ""),
        ("*:*", ",,"),
        ("*:*", ",".join(f"p{number}:80" for number in range(9))),
        ("127.0.0.1:*", "[::ffff:127.0.0.2]:80"),
        ("[::]/0:80", "10.0.0.1:80"),
        ("[fe80::]/10:80", "[fe80::1%eth0]:80"),
        ("[fd00::]/8:80", "[fd00::1%a]]@[2001:db8::1]:80?[x]:80"),
        ("10.0.0.0/8:80", "[::ffff:10.0.0.1%a]]@[::ffff:192.0.2.1]:8080?[x]:80"),
    ],
)
def test_refused(patterns: str, named: str) -> None:
    with pytest.raises(BadRequest, match=PREFILLER_HEADER) as refused:
        AllowedPrefillers(patterns, "prefill-hosts").named(named)
    assert refused.value.param == PREFILLER_HEADER


def test_order_is_kept_and_nobody_is_named_twice() -> None:
    allowed = AllowedPrefillers("*:8000", "prefill-hosts")
    assert allowed.named("b:8000, a:8000,b:8000") == ["b:8000", "a:8000"]


@pytest.mark.parametrize("wrong", ["p0", "10.0.0.0/33:80", "p0:0", "p0:9-8", "p0:http", "http://p0:80", "p0:80:*"])
def test_patterns_say_a_port(wrong: str) -> None:
    with pytest.raises(BadRequest, match="prefill-hosts") as refused:
        AllowedPrefillers(wrong, "prefill-hosts")
    assert refused.value.param == "prefill-hosts"


def test_empty_allows_nobody() -> None:
    assert not AllowedPrefillers(" , ", "prefill-hosts")
