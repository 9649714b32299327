"""Requests that name prefillers, between a played AsyncLLM and its core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.datastructures import State

from tercet.engine import verbs
from tercet.engine.interface import SeqParams
from tercet.protocol import LeaseEnded, Request, TercetError
from tercet.protocol.headers import PREFILLED_HEADER, PREFILLER_HEADER
from tercet.protocol.names import AllowedPrefillers
from tercet.protocol.spans import TraceEvent, VerbTrace
from tercet.vllm_plugin.core.connector_messages import BACKGROUND_PREFIX, TercetParams, params_of
from tercet.vllm_plugin.edge.attached_engine import LoadMeter
from tercet.vllm_plugin.edge.prefilled_requests import PrefilledRequests, PrefillerHeader
from tercet.wire.callers import BearerKeys, Callers

PARAMS = TercetParams("token", seq=SeqParams("lease", 99))


def waiting(**fields: object) -> SimpleNamespace:
    """Return what vLLM keeps of a request without a first token."""
    return SimpleNamespace(prompt_len=100, is_prefilling=True, **fields)


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, SimpleNamespace] = {}

    def abort_requests(self, ids: Sequence[str], internal: bool) -> None:
        for each in ids:
            self.request_states.pop(each, None)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def update_scheduler_stats(self, stats: object) -> None: ...


@pytest.fixture(autouse=True)
def played_adoption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "adopted", lambda edge, request: edge.adopted(request))  # pyright: ignore[reportUnknownLambdaType,reportUnknownMemberType]


class PlayedEngine:
    """An attached engine that is its own edge."""

    name = "d"

    def __init__(self, client: Any) -> None:
        self.edge = self
        self.description = SimpleNamespace(token="token")
        self.open = 0
        self.leases = SimpleNamespace(find=lambda lease: lease if lease == "held" else None)  # pyright: ignore[reportUnknownLambdaType]
        self.failure: TercetError | None = None
        idle: Any = SimpleNamespace(core_status={"running": 0, "kv_cache_usage": 0.0}, stalled_s=0.0)
        adapters: Any = SimpleNamespace(load_of=lambda processor: None)
        self.meter = LoadMeter(client, idle, adapters)

    @asynccontextmanager
    async def adopted(self, request: Request) -> AsyncGenerator[SeqParams | None]:
        if self.failure is not None:
            raise self.failure
        self.open += 1
        try:
            yield PARAMS.seq
        finally:
            self.open -= 1


class Remote:
    """Prefills as far as it is ``let``."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.asked = list[tuple[Request, Sequence[str]]]()
        self.cached: int | None = 48

    @asynccontextmanager
    async def prefilled(
        self, decode: Any, request: Request, hosts: Sequence[str], trace: VerbTrace
    ) -> AsyncGenerator[int]:
        self.asked.append((request, hosts))
        trace.program = "disaggregated"
        await self.let.wait()
        trace.events.append(TraceEvent("prep_recv", "d"))
        if self.cached is not None:
            trace.events.append(TraceEvent("remote_send", "p", cached=self.cached))
        yield request.num_tokens - 1


class House:
    """The application adds one request to vLLM, as its serving objects do."""

    def __init__(self, allowed: str = "10.0.0.0/8:8000", **fields: Any) -> None:
        self.processor, self.remote = Processor(), Remote()
        self.added = list[Any]()
        self.core = SimpleNamespace(add_request_async=self.add)
        client: Any = SimpleNamespace(output_processor=self.processor, engine_core=self.core)
        self.engine = PlayedEngine(client)
        engine, remote = self.engine, self.remote
        self.requests = PrefilledRequests(client, engine, remote)  # type: ignore[arg-type]
        state = State({"tercet_prefillers": AllowedPrefillers(allowed, "prefill_hosts")})
        state.tercet_trace_keys, state.tercet_verbs = BearerKeys(()), SimpleNamespace(callers=Callers(()))
        self.layer = PrefillerHeader(self.app, state)
        self.sent = list[Any]()
        self.state = waiting(remote_prefill_cached_tokens=None)
        sampling = SimpleNamespace(extra_args=fields.pop("extra_args", None), prompt_logprobs=None)
        told: dict[str, Any] = {
            "request_id": "r", "prompt_token_ids": list(range(100)), "mm_features": None, "lora_request": None,
            "prompt_embeds": None, "resumable": False, "sampling_params": sampling, "priority": 0, "cache_salt": "s",
        }  # fmt: skip
        self.request: Any = SimpleNamespace(**{**told, **fields})

    async def add(self, request: Any) -> None:
        self.added.append(request)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.processor.request_states[self.request.request_id] = self.state
        await self.core.add_request_async(self.request)
        body = b'{"choices": []}'
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    async def call(
        self, named: str | None = "10.0.0.1:8000", path: str = "/v1/completions", prefilled: str | None = None
    ) -> Any:
        headers = [(b"x-tercet-trace", b"true")]
        if prefilled is not None:
            headers.append((PREFILLED_HEADER.encode(), prefilled.encode()))
        if named is not None:
            headers.append((PREFILLER_HEADER.encode(), named.encode()))

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.layer({"type": "http", "path": path, "headers": headers}, self.app, send)  # type: ignore[arg-type]
        return msgspec.json.decode(self.sent[-1]["body"])


@pytest.fixture
def house() -> House:
    return House()


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_others_compute_is_no_work_of_this_engine(house: House, leaves: bool) -> None:
    """Its tokens count from when its KV is there; the request waits all the time."""
    calling = asyncio.create_task(house.call())
    await asyncio.sleep(0)
    assert (house.engine.meter.load().tokens, house.engine.meter.load().waiting) == (0, 1)
    if leaves:
        calling.cancel()
        await asyncio.wait({calling})
        assert house.engine.meter.load().tokens == 0
        house.processor.request_states["other"] = waiting()
    else:
        house.remote.let.set()
        await calling
    assert house.engine.meter.load().tokens == 100


def test_work_in_the_background_is_no_work_that_others_wait_for(house: House) -> None:
    house.processor.request_states[f"{BACKGROUND_PREFIX}1"] = waiting()
    assert (house.engine.meter.load().tokens, house.engine.meter.load().waiting) == (0, 1)
    house.processor.request_states["other"] = waiting()
    assert house.engine.meter.load().tokens == 100


async def test_a_request_reaches_the_core_with_its_kv() -> None:
    house = House(extra_args={"kv_transfer_params": {"theirs": 1}, "other": 2})
    calling = asyncio.create_task(house.call())
    await asyncio.sleep(0)
    assert not house.added
    before = house.request.sampling_params
    house.remote.let.set()
    said = await calling
    (request,) = house.added
    ours = PARAMS.to_kv_transfer_params()
    assert request.sampling_params.extra_args == {"kv_transfer_params": {"theirs": 1, **ours}, "other": 2}
    assert before.extra_args["kv_transfer_params"] == {"theirs": 1}  # sequences of one request may share them
    assert said["tercet"]["events"][-1] == {"verb": "start_generate", "engine": "d", "begin": 99, "end": 100}
    ((asked, hosts),) = house.remote.asked
    assert (asked.prompt, asked.cache_salt, hosts) == (tuple(range(100)), "s", ["10.0.0.1:8000"])
    assert not house.engine.open


async def test_what_a_client_says_instead_of_parameters_has_no_effect() -> None:
    """``vllm_xargs`` lets it say text."""
    house = House(extra_args={"kv_transfer_params": "tercet"})
    house.remote.let.set()
    await house.call()
    assert house.request.sampling_params.extra_args == {"kv_transfer_params": PARAMS.to_kv_transfer_params()}


@pytest.mark.parametrize("said", [None, {}, "tercet", ["tercet"], 7, {"tercet": "x"}, {"tercet": {"token": "other"}}])
def test_parameters_without_this_engines_token_are_nobodys(said: Any) -> None:
    assert params_of(said, "token") is None
    assert params_of(PARAMS.to_kv_transfer_params(), "token") == PARAMS


@pytest.mark.parametrize(
    "fields",
    [{"mm_features": [1]}, {"lora_request": object()}, {"prompt_embeds": object()}, {"resumable": True},
     {"prompt_token_ids": None}, {"sampling_params": SimpleNamespace(extra_args=None, prompt_logprobs=1)}],
)  # fmt: skip
async def test_what_only_this_engine_can_prefill(fields: Any) -> None:
    house = House(**fields)
    said = await house.call()
    assert (house.remote.asked, house.added) == ([], [house.request])
    assert "cannot be prefilled elsewhere" in said["tercet"]["events"][0]["reason"]


@pytest.mark.parametrize("call", [{"named": None}, {"path": "/metrics"}])
async def test_without_the_header_nothing_waits(house: House, call: Any) -> None:
    assert "tercet" not in await house.call(**call)
    assert (house.remote.asked, house.added) == ([], [house.request])


async def test_strangers_are_refused_and_without_a_list_the_header_is_ignored(house: House) -> None:
    assert (await house.call("11.0.0.1:8000"))["error"]["param"] == PREFILLER_HEADER
    assert (house.sent[0]["status"], house.added) == (400, [])
    open_to_nobody = House(allowed="")
    await open_to_nobody.call()
    assert (open_to_nobody.remote.asked, open_to_nobody.added) == ([], [open_to_nobody.request])


async def test_a_request_that_is_given_up_while_it_waits_is_not_registered_any_more(house: House) -> None:
    calling = asyncio.create_task(house.call())
    while not house.remote.asked:
        await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})
    assert (house.added, house.processor.request_states) == ([], {})


async def test_a_request_that_was_aborted_while_it_waited_does_not_reach_the_core(house: House) -> None:
    calling = asyncio.create_task(house.call())
    while not house.remote.asked:
        await asyncio.sleep(0)
    house.processor.abort_requests(["r"], internal=True)
    house.remote.let.set()
    await calling
    assert not house.added
    assert not house.engine.open


async def test_a_lease_that_is_over_costs_nothing_but_the_prefill(house: House) -> None:
    house.engine.failure = LeaseEnded("over")
    house.remote.let.set()
    said = await house.call()
    assert house.added == [house.request]
    assert said["tercet"]["events"][-1]["code"] == "lease_ended"


# ---- what was cached -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [0, 48, None])
async def test_what_the_engine_that_prefilled_had_is_told_as_cached(house: House, cached: int | None) -> None:
    """Where nobody else computed anything, vLLM tells what it found itself."""
    house.remote.cached = cached
    house.remote.let.set()
    await house.call()
    assert house.state.remote_prefill_cached_tokens == cached


async def test_a_prefill_whose_lease_is_over_was_for_nothing(house: House) -> None:
    house.engine.failure = LeaseEnded("over")
    house.remote.let.set()
    await house.call()
    assert house.state.remote_prefill_cached_tokens is None


@pytest.mark.parametrize("allowed", ["", "10.0.0.0/8:8000"])
@pytest.mark.parametrize(
    ("said", "told"),
    [("held 48", 48), ("held 0", 0), ("held 5000", 100), ("other 48", None), ("48", None), ("held", None), ("", None),
     ("held -1", None), ("held many", None), ("held 1e3", None), ("held " + "9" * 5000, None), (None, None)],
)  # fmt: skip
async def test_a_sidecar_tells_what_was_cached_by_the_name_of_a_lease(
    allowed: str, said: str | None, told: int | None
) -> None:
    house = House(allowed)
    await house.call(named=None, prefilled=said)
    assert (house.added, house.state.remote_prefill_cached_tokens) == ([house.request], told)
