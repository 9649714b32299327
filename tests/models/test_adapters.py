"""LoRA adapters on two real engines: each gives the tokens of its own run on one, whatever becomes of requests."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tercet.protocol import BadRequest, Conflict, LayoutMismatch, Request, TercetError, UnknownAdapter
from tercet.wire.client import HttpEngine
from tests.engines.conftest import Fleet, get_json, settled, start_fleet
from tests.engines.moving import answer_of, ask, moving, until
from tests.engines.processes import processes_of, send_signal
from tests.engines.prompts import BLOCK, alone, calls_of, complete, prompt_of, tokens_of
from tests.longest_wait import LONGEST_WAIT_S

from .adapters import write_adapter
from .checkpoints import checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LENGTHS = (5, 2 * BLOCK + 40)
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """Paths of random adapters by name; no two have the same contents."""
    model = checkpoint("llama")
    return {name: str(write_adapter(model, tmp_path / name, seed)) for seed, name in enumerate("abcd", 1)}


@pytest.fixture
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Generator[Fleet]:
    """Two engines that begin with the adapters a and b, with what flags of vLLM's a test asks for."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    modules = [part for name in "ab" for part in ("--lora-modules", f"{name}={adapters[name]}")]
    args = ("--program-arg", "min_send=1", *modules, "--", "--max-loras", "2", "--max-num-batched-tokens", "256")
    more = getattr(request, "param", ("--max-model-len", "1024"))
    running = start_fleet(tmp_path, *args, *more, model=str(checkpoint("llama")))
    yield running
    running.stop()


async def test_adapters_follow_their_requests(fleet: Fleet, adapters: dict[str, str]) -> None:
    listed = get_json(f"{fleet.url}/v1/models")["data"]
    base = listed[0]["id"]
    assert [(each["id"], each["parent"]) for each in listed[1:]] == [("a", base), ("b", base)]
    await _programs(fleet, base)
    await _context(fleet, base)
    await _moves(fleet, base)
    await _contents(fleet, adapters)
    await _loading(fleet, adapters)
    await _in_place(fleet, adapters)
    for role in ("prefill", "decode"):
        async with HttpEngine(role, fleet.engine_url(role)) as engine:
            await settled(engine)
    await _failover(fleet)


async def _programs(fleet: Fleet, base: str) -> None:
    one = fleet.engine_url("prefill")
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = {name: await alone(one, prompt, model=name, ignore_eos=True) for name in (base, "a", "b")}
        assert len({tuple(tokens) for tokens in expected.values()}) == 3, "adapters have an effect"
        salt = uuid.uuid4().hex  # the same for all three: nothing but the adapter keeps them apart
        for name, tokens in expected.items():
            for program in ("disaggregated", "balanced", "data_parallel"):
                headers = {"x-tercet-trace": "1", "x-tercet-program": program}
                fields: dict[str, Any] = {"model": name, "cache_salt": f"{salt}{program}", "ignore_eos": True}
                answer = await complete(fleet.url, prompt, headers, **fields)
                assert (answer["model"], tokens_of(answer)) == (name, tokens), (name, program, length)
                if program == "disaggregated":
                    assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]
                    last = answer["tercet"]["events"][-1]
                    assert (last.get("cached", 0), last["computed"]) == (0, 1), "it lies there for this adapter only"


def _request(length: int, adapter: str | None, salt: str, **sampling: Any) -> Request:
    return Request(
        seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(length, seed=3)), cache_salt=salt, adapter=adapter,
        sampling_params={"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling},
    )  # fmt: skip


async def _context(fleet: Fleet, base: str) -> None:
    """Context that was sent for one adapter is found for that one only, and gives its tokens."""
    salt, source, target = uuid.uuid4().hex, fleet.engine_url("prefill"), fleet.engine_url("decode")
    async with HttpEngine("prefill", source) as sender, HttpEngine("decode", target) as receiver:
        request = _request(300, "a", salt)
        async with receiver.prep_recv(request) as space:
            for wrong in ("b", None):
                with pytest.raises((LayoutMismatch, BadRequest)):
                    await sender.remote_send(_request(300, wrong, salt), space, 0)
            await sender.remote_send(request, space, space.matched_len)
        for adapter, cached in (("b", 0), (None, 0), ("a", 300 // BLOCK * BLOCK)):
            outputs = [output async for output in receiver.start_generate(_request(300, adapter, salt))]
            assert outputs[0].usage is not None
            assert outputs[0].usage.cached == cached, adapter
            expected = await alone(source, prompt_of(300, seed=3), model=adapter or base, ignore_eos=True)
            assert [token for output in outputs for token in output.token_ids] == expected


async def _moves(fleet: Fleet, base: str) -> None:
    """Running requests of both adapters and of the base model go back and forth, side by side."""
    prompt, headers, names = prompt_of(300, seed=5), {"x-tercet-program": "data_parallel"}, ("a", "b", base)

    async def one(name: str) -> list[Any]:
        return answer_of(
            await complete(fleet.url, prompt, headers, model=name, cache_salt=uuid.uuid4().hex, **LONG)
        )  # fmt: skip

    calm = [await one(name) for name in names]
    async with moving(fleet) as moved:
        assert await asyncio.gather(*map(one, names)) == calm
    assert len(moved) >= 2


async def _contents(fleet: Fleet, adapters: dict[str, str]) -> None:
    """Two engines with one name for different contents exchange nothing, and the fleet means one of them."""
    source, target = fleet.engine_url("prefill"), fleet.engine_url("decode")
    async with HttpEngine("prefill", source) as sender, HttpEngine("decode", target) as receiver:
        ours = await sender.load_adapter("c", adapters["c"])
        theirs = await receiver.load_adapter("c", adapters["d"])
        assert ours.digest != theirs.digest
        async with receiver.prep_recv(_request(300, "c", uuid.uuid4().hex)) as space:
            with pytest.raises(LayoutMismatch, match="has the digest"):
                await sender.remote_send(_request(300, "c", uuid.uuid4().hex), space, 0)
        found = await _until_listed(fleet, "c")
        assert len(found["engines"]) == 1
        await receiver.unload_adapter("c")
        with pytest.raises(UnknownAdapter):
            await receiver.unload_adapter("c")
        await sender.unload_adapter("c")


# With fewer blocks the tiny model's KV would be too little to be shared. One of them is nobody's.
FEW_BLOCKS = 128
SHARERS = ("a", "b", "a", None, "a", "b")
# Together they have 120 blocks in the beginning, and want 132 in the end.
PROMPT, OUTPUT = 20 * BLOCK - 20, BLOCK + 60
SMALL_POOL = ("--max-model-len", "4096", "--num-gpu-blocks-override", str(FEW_BLOCKS))


@pytest.mark.parametrize("fleet", [SMALL_POOL], indirect=True)
async def test_preempted_requests_go_on_with_their_adapters(fleet: Fleet) -> None:
    """Requests outgrow the pool together, one of them on a lease that another engine has filled."""
    source, target = fleet.engine_url("prefill"), fleet.engine_url("decode")
    base = get_json(f"{fleet.url}/v1/models")["data"][0]["id"]
    sampling: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True}

    async def generated(engine: HttpEngine, request: Request) -> list[int]:
        return [token async for output in engine.start_generate(request) for token in output.token_ids]

    async with HttpEngine("prefill", source) as sender, HttpEngine("decode", target) as receiver:
        free = (await settled(receiver)).free_blocks
        assert free == FEW_BLOCKS - 1
        requests = [_request(PROMPT, adapter, uuid.uuid4().hex, **sampling) for adapter in SHARERS]
        expected = dict[str | None, list[int]]()
        for name in ("a", "b", None):
            expected[name] = await alone(source, prompt_of(PROMPT, seed=3), model=name or base, **sampling)
        assert len({tuple(tokens) for tokens in expected.values()}) == 3
        before = await _preemptions(target)
        *others, adopting = requests
        async with receiver.prep_recv(adopting) as space:
            assert (await sender.remote_send(adopting, space, 0)).end == PROMPT
            running = [asyncio.create_task(generated(receiver, request)) for request in others]
            await _until_busy(receiver, len(others))
            # The last to come is the first that vLLM preempts.
            found = [await generated(receiver, adopting), *await asyncio.gather(*running)]
        assert found == [expected[request.adapter] for request in (adopting, *others)]
        assert await _preemptions(target) > before
        for engine in (sender, receiver):
            assert (await settled(engine)).free_blocks == free


async def _until_busy(engine: HttpEngine, requests: int) -> None:
    while (status := await engine.status()).running + status.waiting < requests:
        await asyncio.sleep(0.05)


async def _preemptions(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_preemptions_total{"))


async def _until_listed(fleet: Fleet, name: str, listed: bool = True) -> dict[str, Any]:
    """What the router says of an adapter that an engine has loaded by itself, once it has noticed."""
    async with asyncio.timeout(LONGEST_WAIT_S):
        while True:
            _, found = await ask(fleet, "GET", "/adapters")
            here = [each for each in found if each["name"] == name]
            if bool(here) is listed:
                return here[0] if here else {}
            await asyncio.sleep(0.1)


async def _loading(fleet: Fleet, adapters: dict[str, str]) -> None:
    await _until_listed(fleet, "c", listed=False)
    status, found = await ask(fleet, "POST", "/adapters", json={"name": "d", "path": adapters["d"]})
    assert (status, sorted(found["engines"])) == (201, ["decode-0", "prefill-0"])
    prompt = prompt_of(LENGTHS[1])
    answer = await complete(fleet.url, prompt, model="d", cache_salt=uuid.uuid4().hex, ignore_eos=True)
    expected = await alone(fleet.engine_url("prefill"), prompt, model="d", ignore_eos=True)
    assert tokens_of(answer) == expected
    status, _ = await ask(fleet, "POST", "/adapters", json={"name": "e", "path": "/nowhere"})
    assert 400 <= status < 500
    running = asyncio.create_task(complete(fleet.url, prompt, model="d", cache_salt=uuid.uuid4().hex, **LONG))
    await until(fleet, lambda all_running: any(each["tokens"] > 3 for each in all_running))
    status, _ = await ask(fleet, "DELETE", "/adapters/d")
    assert status == 200
    assert len(tokens_of(await running)) == LONG["max_tokens"], "what runs goes on"
    with pytest.raises(AssertionError, match="does not exist"):
        await complete(fleet.url, prompt, model="d")
    async with HttpEngine("decode", fleet.engine_url("decode")) as engine:
        with pytest.raises(UnknownAdapter, match="it has a, b"):
            async with engine.prep_recv(_request(300, "d", "salt")):
                pass
        with pytest.raises(Conflict, match="unload it first"):
            await engine.load_adapter("a", adapters["d"])
        with pytest.raises(TercetError, match=r"has no adapter|No adapter"):
            await engine.load_adapter("e", "/nowhere")


async def _in_place(fleet: Fleet, adapters: dict[str, str]) -> None:
    """A name stands for other weights, from another path and from its own, and never while requests run with it."""
    prompt = prompt_of(300, seed=8)
    fields: dict[str, Any] = {"cache_salt": uuid.uuid4().hex, "ignore_eos": True}
    one = fleet.engine_url("prefill")
    before, old = await _until_listed(fleet, "a"), tokens_of(await complete(fleet.url, prompt, model="a", **fields))
    running = asyncio.create_task(
        complete(fleet.url, prompt, model="a", cache_salt=uuid.uuid4().hex, max_tokens=300, ignore_eos=True)
    )
    await until(fleet, lambda all_running: any(each["tokens"] > 3 for each in all_running))
    generating = next(each["url"] for each in get_json(f"{fleet.url}/tercet/v1/engines") if each["in_flight"])
    for url in (fleet.url, generating):
        assert await _loaded_in_place(url, "a", adapters["c"]) == 409
    status, answer = await ask(fleet, "PUT", "/adapters/a", json={"path": adapters["c"]})
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert await _until_listed(fleet, "a") == before
    assert len(tokens_of(await running)) == 300
    async with HttpEngine("decode", fleet.engine_url("decode")) as engine:
        async with engine.prep_recv(_request(300, "a", uuid.uuid4().hex)):
            assert await _loaded_in_place(fleet.url, "a", adapters["c"]) == 409, "a lease uses it, too"
        await settled(engine)
    again = Path(adapters["c"]).with_name("again")  # what an engine has by that name, to compare with
    for seed, alias in ((3, "same"), (33, "others")):
        if alias == "others":  # in the same place, as who trains an adapter on and on writes it
            write_adapter(checkpoint("llama"), Path(adapters["c"]), seed)
            with pytest.raises(AssertionError, match=r"does not exist|have changed since"):
                await complete(fleet.url, prompt, model="a", **fields)
        assert await _loaded_in_place(fleet.url, "a", adapters["c"]) == 200
        found = await _until_listed(fleet, "a")
        assert (len(found["engines"]), found["path"]) == (2, adapters["c"])
        same = write_adapter(checkpoint("llama"), again / alias, seed)
        async with HttpEngine("prefill", one) as engine:
            assert found["digest"] == (await engine.load_adapter(alias, str(same))).digest
        new = tokens_of(await complete(fleet.url, prompt, model="a", **fields))
        assert new == await alone(one, prompt, model=alias, ignore_eos=True)
        assert new != old, "with the same salt: nothing of the old one's KV was found"
        old = new
        async with HttpEngine("prefill", one) as engine:
            await engine.unload_adapter(alias)


async def _loaded_in_place(url: str, name: str, path: str) -> int:
    """What vLLM's own route answers, at a router or at an engine."""
    body = {"lora_name": name, "lora_path": path, "load_inplace": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/load_lora_adapter", json=body) as answer:
        if answer.status >= 400:
            assert (await answer.json())["error"]["code"] == "conflict"
        return answer.status


async def _failover(fleet: Fleet) -> None:
    """The engine that decodes dies after some tokens, and the other one goes on with the adapter."""
    prompt, trace = prompt_of(300, seed=6), {"x-tercet-trace": "1"}
    fields: dict[str, Any] = {"model": "b", "max_tokens": 120, "ignore_eos": True}
    calm = await complete(fleet.url, prompt, cache_salt=uuid.uuid4().hex, **fields)
    asked = asyncio.create_task(complete(fleet.url, prompt, trace, cache_salt=uuid.uuid4().hex, **fields))
    await until(fleet, lambda running: any(each["engine"] == "decode-0" and each["tokens"] > 5 for each in running))
    send_signal(processes_of(fleet.engine_url("decode")), signal.SIGKILL)
    answer = await asked
    assert answer_of(answer) == answer_of(calm)
    assert answer["tercet"]["events"][-1]["engine"] == "prefill-0"
