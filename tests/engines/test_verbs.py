"""The verbs over HTTP: what they return, what they refuse, and that a lease always ends."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from tercet.protocol import (
    BadRequest,
    Conflict,
    KVAddrInfo,
    LayoutMismatch,
    NoSpace,
    Request,
    Reservation,
    TransferFailed,
    UnknownSequence,
)
from tercet.wire.client import HttpEngine
from tests.abort import abort

from .conftest import MAX_BATCHED, Fleet, settled
from .prompts import BLOCK, alone, computed_prompt_tokens, prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("verbs")]


def request_of(prompt: list[int], **fields: Any) -> Request:
    sampling = {"temperature": 0, "max_tokens": 8, **fields.pop("sampling", {})}
    salt = fields.pop("cache_salt", uuid.uuid4().hex)
    return Request(
        seq_id=uuid.uuid4().hex, prompt=tuple(prompt), sampling_params=sampling, cache_salt=salt, **fields
    )  # fmt: skip


async def generate(engine: HttpEngine, request: Request, begin: int = 0, output: tuple[int, ...] = ()) -> list[int]:
    return [token async for item in engine.start_generate(request, begin, output) for token in item.token_ids]


# ---- what they do --------------------------------------------------------------------------------------------


async def test_start_generate_needs_no_prep_recv(fleet: Fleet, decode: HttpEngine) -> None:
    prompt = prompt_of(100)
    assert await generate(decode, request_of(prompt)) == await alone(decode.url, prompt, max_tokens=8)


async def test_text_prompts_are_tokenised_by_the_engine(decode: HttpEngine) -> None:
    call = {"prompt": "The capital of France is", "seq_id": "text", "stream": False,
            "sampling_params": {"temperature": 0, "max_tokens": 4}}  # fmt: skip
    status, answer = await post(decode, "start_generate", call)
    assert status == 200, answer
    assert len(answer["token_ids"]) == 4
    assert answer["finish_reason"] == "length"


async def test_negative_end_counts_from_the_prompts_end(decode: HttpEngine) -> None:
    async with decode.prep_recv(request_of(prompt_of(200)), end=-1) as space:
        assert (space.matched_len, space.end) == (0, 199)


async def test_without_sampling_the_receiver_samples_the_first_token(prefill: HttpEngine, decode: HttpEngine) -> None:
    prompt = prompt_of(300)
    request = request_of(prompt)
    async with decode.prep_recv(request, end=-1) as space:
        sent = await prefill.remote_send(request, space, space.matched_len)
        assert sent.first is None
        tokens = await generate(decode, request, sent.end)
    assert tokens == await alone(decode.url, prompt, max_tokens=8)


async def test_the_split_point_is_the_callers(prefill: HttpEngine, decode: HttpEngine) -> None:
    """Balanced disaggregation: the receiver prefills what is beyond `end`."""
    prompt = prompt_of(400)
    request = request_of(prompt)
    async with decode.prep_recv(request, end=250) as space:
        await prefill.remote_send(request, space, 0)
        outputs = [item async for item in decode.start_generate(request, 250)]
    usage = outputs[0].usage
    assert usage is not None
    assert (usage.cached, usage.received, usage.computed) == (0, 250, 150)
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)


async def test_received_kv_is_ordinary_prefix_cache(prefill: HttpEngine, decode: HttpEngine) -> None:
    """Context migration: two verbs, and another sequence finds the context."""
    context, salt = prompt_of(3 * BLOCK), uuid.uuid4().hex
    moved = request_of(context, cache_salt=salt)
    async with decode.prep_recv(moved) as space:
        await prefill.remote_send(moved, space, 0)
    prompt = context + prompt_of(30, seed=1)
    outputs = [item async for item in decode.start_generate(request_of(prompt, cache_salt=salt))]
    usage = outputs[0].usage
    assert usage is not None
    assert usage.cached == 3 * BLOCK
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)


async def test_cached_kv_is_sent_without_a_forward_pass(prefill: HttpEngine, decode: HttpEngine) -> None:
    context, salt = prompt_of(2 * BLOCK), uuid.uuid4().hex
    await generate(prefill, request_of([*context, 5], cache_salt=salt))
    moved = request_of(context, cache_salt=salt)
    async with decode.prep_recv(moved) as space:
        sent = await prefill.remote_send(moved, space, 0)
    assert (sent.usage.cached, sent.usage.computed) == (2 * BLOCK, 0)
    layout = space.kv_addr_info.layout
    assert sent.bytes == 2 * layout.num_layers * layout.block_bytes


@pytest.mark.parametrize("end", [None, -1, 2 * BLOCK + 9, 2 * BLOCK, BLOCK - 1, 1])
async def test_cached_only_computes_nothing_at_any_end(
    prefill: HttpEngine, decode: HttpEngine, end: int | None
) -> None:
    prompt = prompt_of(3 * BLOCK + 30)
    request = request_of(prompt)
    await generate(prefill, msgspec.structs.replace(request, prompt=tuple(prompt[: 2 * BLOCK + 20])))
    before = await computed_prompt_tokens(prefill.url)
    assert before > 0
    async with decode.prep_recv(request) as space:
        sent = await prefill.remote_send(request, space, 0, end, cached_only=True)
        asked = len(prompt) if end is None else end % len(prompt)
        assert (sent.begin, sent.end) == (0, min(2, asked // BLOCK) * BLOCK)
        assert (sent.usage.cached, sent.usage.computed, sent.bytes > 0) == (sent.end, 0, sent.end > 0)
        outputs = [item async for item in decode.start_generate(request, sent.end)]
    assert await computed_prompt_tokens(prefill.url) == before
    usage = outputs[0].usage
    assert usage is not None
    assert (usage.received, usage.computed) == (sent.end, len(prompt) - sent.end)
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)


async def test_two_senders_may_fill_one_reservation(prefill: HttpEngine, decode: HttpEngine) -> None:
    prompt = prompt_of(2 * BLOCK + 40)
    request = request_of(prompt)
    async with decode.prep_recv(request, end=-1) as space:
        await prefill.remote_send(request, space, 0, BLOCK)
        await prefill.remote_send(request, space, BLOCK)
        outputs = [item async for item in decode.start_generate(request, space.end)]
    usage = outputs[0].usage
    assert usage is not None
    assert (usage.received, usage.computed) == (len(prompt) - 1, 1)
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)


async def test_engines_tell_the_lives_of_leases(prefill: HttpEngine, decode: HttpEngine) -> None:
    request, unused = request_of(prompt_of(3 * BLOCK)), request_of(prompt_of(BLOCK))
    async with decode.prep_recv(request, end=-1) as space:
        await prefill.remote_send(request, space, 0)
        await generate(decode, request, space.end)
    (adopted,) = await decode.lease_stories(request.seq_id)
    assert space.lease.startswith(adopted.lease)
    assert space.lease != adopted.lease, "whole it would allow to release a lease"
    states = [*dict.fromkeys(state for _, _, state, _ in adopted.steps)]
    assert states == ["asked", "reserved", "open", "filled", "claimed", "fenced", "adopted"]
    async with decode.prep_recv(unused):
        pass
    async with asyncio.timeout(10):
        while (lives := await decode.lease_stories(unused.seq_id))[0].steps[-1][2] != "freed":
            await asyncio.sleep(0.02)
    assert [state for _, _, state, _ in lives[0].steps][-3:] == ["ending", "fenced", "freed"]
    assert await decode.lease_stories("nobody's") == []


async def test_a_lease_is_extended_while_its_sequence_grows(prefill: HttpEngine, decode: HttpEngine) -> None:
    """As live migration does: what there is is sent, then what was added, under one lease; then the cut-over."""
    prompt = prompt_of(400)
    whole = request_of(prompt)
    begun = msgspec.structs.replace(whole, prompt=tuple(prompt[:200]))
    async with decode.prep_recv(begun) as space:
        await prefill.remote_send(begun, space, 0)
        free = (await decode.status()).free_blocks
        more = await decode.extend_recv(space, whole, end=-1)
        assert (more.lease, more.kv_addr_info.begin, more.end) == (space.lease, 0, 399)
        assert more.matched_len in (0, 200 // BLOCK * BLOCK), "what was committed by then"
        assert (await decode.status()).free_blocks <= free
        for end in (150, 10_000):
            with pytest.raises(BadRequest):
                await decode.extend_recv(more, whole, end=end)
        await prefill.remote_send(whole, more, 200 // BLOCK * BLOCK)
        outputs = [item async for item in decode.start_generate(whole, more.end)]
    assert outputs[0].usage is not None
    assert (outputs[0].usage.received, outputs[0].usage.computed) == (399, 1)
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)
    with pytest.raises(UnknownSequence):
        await decode.extend_recv(more, whole)


async def test_what_did_not_arrive_is_computed(decode: HttpEngine) -> None:
    """A caller's promise is not trusted: no token comes from KV that is not there."""
    prompt = prompt_of(300)
    request = request_of(prompt)
    async with decode.prep_recv(request):
        outputs = [item async for item in decode.start_generate(request, 300)]
    usage = outputs[0].usage
    assert usage is not None
    assert usage.computed == 300
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)


async def test_output_generated_elsewhere_counts(decode: HttpEngine) -> None:
    prompt = prompt_of(100)
    expected = await alone(decode.url, prompt, max_tokens=8)
    rest = await generate(decode, request_of(prompt), 0, tuple(expected[:5]))
    assert expected[:5] + rest == expected


async def test_output_may_be_cached_already(decode: HttpEngine) -> None:
    """More than the prompt is found in the prefix cache; vLLM itself never has that of a new request."""
    prompt, salt = prompt_of(10), uuid.uuid4().hex
    whole = await generate(
        decode, request_of(prompt, cache_salt=salt, sampling={"max_tokens": 300, "ignore_eos": True})
    )
    request = request_of(prompt, cache_salt=salt, sampling={"max_tokens": 300, "ignore_eos": True})
    assert await generate(decode, request, 0, tuple(whole[:280])) == whole[280:]


async def test_sends_with_a_common_prefix_at_once(prefill: HttpEngine, decode: HttpEngine) -> None:
    """The second one finds the prefix in a cache whose blocks the first one is only just computing."""
    prefix, salt = prompt_of(2 * BLOCK, seed=77), uuid.uuid4().hex

    async def serve(seed: int) -> list[int]:
        request = request_of([*prefix, *prompt_of(20, seed)], cache_salt=salt if seed else uuid.uuid4().hex)
        async with decode.prep_recv(request) as space:
            sent = await prefill.remote_send(request, space, space.matched_len, sample=True)
            assert sent.first is not None
            return [*sent.first.token_ids, *await generate(decode, request, sent.end, sent.first.token_ids)]

    found = await asyncio.gather(*(serve(seed) for seed in range(1, 7)))
    for seed, tokens in enumerate(found, 1):
        assert tokens == await alone(decode.url, [*prefix, *prompt_of(20, seed)], max_tokens=8)


async def test_prep_recv_is_quick_beside_a_long_prefill(decode: HttpEngine) -> None:
    running = asyncio.create_task(generate(decode, request_of(prompt_of(1500))))
    started = time.monotonic()
    async with decode.prep_recv(request_of(prompt_of(200))):
        waited = time.monotonic() - started
    assert not running.done(), "the prefill should outlast prep_recv, which waits for one step at most"
    await running
    total = time.monotonic() - started
    assert waited < total * 2 * MAX_BATCHED / 1500


# ---- leases --------------------------------------------------------------------------------------------------


async def test_leaving_the_context_ends_the_lease(decode: HttpEngine) -> None:
    before = await settled(decode)
    async with decode.prep_recv(request_of(prompt_of(500))) as space:
        during = await decode.status()
        assert during.leases == 1
        assert during.free_blocks == before.free_blocks - 4
    after = await settled(decode)
    assert after.free_blocks == before.free_blocks
    with pytest.raises(UnknownSequence):
        await release(decode, space.lease)


async def test_lease_expires_by_itself(decode: HttpEngine) -> None:
    call = {"prompt": prompt_of(300), "seq_id": "expires", "ttl": 0.5}
    status, answer = await post(decode, "prep_recv", call)
    assert status == 200, answer
    assert answer["ttl"] == 0.5
    await settled(decode)


async def test_push_to_an_ended_lease_is_refused(prefill: HttpEngine, decode: HttpEngine) -> None:
    request = request_of(prompt_of(300))
    async with decode.prep_recv(request) as space:
        await release(decode, space.lease)
        with pytest.raises(TransferFailed, match="ended"):
            await prefill.remote_send(request, space, 0)


async def test_push_to_a_lease_that_never_was_is_refused(prefill: HttpEngine, decode: HttpEngine) -> None:
    request = request_of(prompt_of(300))
    async with decode.prep_recv(request) as space:
        info = msgspec.structs.replace(space.kv_addr_info, lease="0" * 32)
        with pytest.raises(TransferFailed):
            await prefill.remote_send(request, Reservation(info, 0), 0)


async def test_kv_of_other_tokens_is_refused_and_nothing_of_it_kept(prefill: HttpEngine, decode: HttpEngine) -> None:
    """Y's KV into X's lease: another token, or another cache salt; computed anew, or from the sender's cache."""
    prompt = prompt_of(300)
    mine = request_of(prompt)
    others = [*prompt[:100], prompt[100] + 1, *prompt[101:]]
    before = (await decode.status()).counters["chunks_received"]
    async with decode.prep_recv(mine) as space:
        for salt, tokens in (("a", others), ("a", others), ("b", prompt)):
            with pytest.raises(TransferFailed, match="of other tokens") as raised:
                await prefill.remote_send(request_of(tokens, cache_salt=salt), space, 0)
            assert raised.value.param == "kv_addr_info"
        assert (await decode.status()).counters["chunks_received"] == before
        outputs = [item async for item in decode.start_generate(mine, 300)]
    assert outputs[0].usage is not None
    assert (outputs[0].usage.received, outputs[0].usage.computed) == (0, 300)
    assert [token for item in outputs for token in item.token_ids] == await alone(decode.url, prompt, max_tokens=8)


async def test_another_salt_than_was_reserved_is_refused(decode: HttpEngine) -> None:
    request = request_of(prompt_of(100))
    async with decode.prep_recv(request):
        with pytest.raises(BadRequest, match="cache_salt"):
            await generate(decode, msgspec.structs.replace(request, cache_salt=None))


async def test_lease_that_ends_during_the_push_stops_it(prefill: HttpEngine, decode: HttpEngine) -> None:
    request = request_of(prompt_of(1500))
    async with decode.prep_recv(request) as space:
        sending = asyncio.create_task(prefill.remote_send(request, space, 0))
        await until(lambda status: status.sends == 1, prefill)
        await release(decode, space.lease)
        with pytest.raises(TransferFailed):
            await sending


async def test_no_space_is_said_and_takes_nothing(decode: HttpEngine) -> None:
    """Leases are capped to a share of the pool, since they cannot be preempted."""
    before = await settled(decode)
    needed = -(-2000 // BLOCK)
    async with AsyncExitStack() as stack:
        for _ in range(int(before.total_blocks * 0.8) // needed):
            await stack.enter_async_context(decode.prep_recv(request_of(prompt_of(2000))))
        full = decode.prep_recv(request_of(prompt_of(2000)))
        with pytest.raises(NoSpace, match="max_lease_share"):
            await full.__aenter__()
    assert (await settled(decode)).free_blocks == before.free_blocks


# ---- abort at each step --------------------------------------------------------------------------------------


async def test_abort_of_a_reservation(decode: HttpEngine) -> None:
    request = request_of(prompt_of(300))
    async with decode.prep_recv(request):
        await abort(decode, request.seq_id)
        assert (await decode.status()).leases == 0


async def test_abort_of_a_send(prefill: HttpEngine, decode: HttpEngine) -> None:
    request = request_of(prompt_of(1500))
    async with decode.prep_recv(request) as space:
        sending = asyncio.create_task(prefill.remote_send(request, space, 0))
        await until(lambda status: status.sends == 1, prefill)
        await abort(prefill, request.seq_id)
        with pytest.raises(UnknownSequence, match="aborted"):
            await sending
        await settled(prefill)


async def test_abort_of_a_generation(decode: HttpEngine) -> None:
    request = request_of(prompt_of(50), sampling={"max_tokens": 500, "ignore_eos": True})
    outputs = []
    async for item in decode.start_generate(request):
        outputs.append(item)
        if len(outputs) == 2:
            await abort(decode, request.seq_id)
    assert outputs[-1].finish_reason == "abort"


async def test_abort_of_nothing_is_fine(decode: HttpEngine) -> None:
    await abort(decode, "nobody")


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.2, 0.6])
async def test_disconnecting_gives_everything_back(prefill: HttpEngine, decode: HttpEngine, after: float) -> None:
    """Cancelled wherever it is, the three-verb sequence leaves nothing behind (see `nothing_leaks`)."""
    request = request_of(prompt_of(700), sampling={"max_tokens": 200, "ignore_eos": True})

    async def serve() -> None:
        async with decode.prep_recv(request) as space:
            sent = await prefill.remote_send(request, space, 0, sample=True)
            assert sent.first is not None
            await generate(decode, request, sent.end, sent.first.token_ids)

    task = asyncio.create_task(serve())
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_client_that_leaves_a_stream_ends_the_sequence(decode: HttpEngine) -> None:
    request = request_of(prompt_of(50), sampling={"max_tokens": 1000, "ignore_eos": True})
    stream = decode.start_generate(request)
    await anext(stream)
    await stream.aclose()
    await settled(decode)


# ---- bad input -----------------------------------------------------------------------------------------------

GOOD_PREP = {"prompt": [1, 2, 3], "seq_id": "bad-input"}


@pytest.mark.parametrize(
    ("verb", "change", "field"),
    [
        ("prep_recv", {"prompt": []}, "prompt"),
        ("prep_recv", {"prompt": ""}, "prompt"),
        ("prep_recv", {"prompt": [10**9]}, "prompt"),
        ("prep_recv", {"prompt": [-1]}, "prompt"),
        ("prep_recv", {"prompt": 7}, "prompt"),
        ("prep_recv", {"prompt": [1] * 100_000}, "prompt"),
        ("prep_recv", {"end": 4}, "end"),
        ("prep_recv", {"end": -4}, "end"),
        ("prep_recv", {"end": -3}, "end"),
        ("prep_recv", {"end": 0}, "end"),
        ("prep_recv", {"end": "three"}, "end"),
        ("prep_recv", {"ttl": -1}, "ttl"),
        ("prep_recv", {"seq_id": ""}, "seq_id"),
        ("prep_recv", {"seqid": "x"}, "seqid"),
        ("start_generate", {"begin": -1}, "begin"),
        ("start_generate", {"begin": 4}, "begin"),
        ("start_generate", {"output": ["a"]}, "output"),
        ("start_generate", {"output": [10**6]}, "output"),
        ("start_generate", {"output": [2**40]}, "output"),
        ("start_generate", {"output": [5] * 2045, "sampling_params": {"max_tokens": 4000}}, "output"),
        ("start_generate", {"sampling_params": {"temprature": 0}}, "sampling_params.temprature"),
        ("start_generate", {"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ("start_generate", {"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ("start_generate", {"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ("start_generate", {"sampling_params": {"n": 2}}, "sampling_params.n"),
        ("start_generate", {"sampling_params": {"max_tokens": 2}, "output": [4, 5]}, "sampling_params.max_tokens"),
        ("start_generate", {"sampling_params": {"structured_outputs": {"regex": "("}}}, None),
        ("start_generate", {"stream": "yes"}, "stream"),
        ("abort", {"prompt": [1]}, "prompt"),
        ("release", {"lease": ""}, "lease"),
        ("remote_send", {}, "kv_addr_info"),
    ],
)
async def test_bad_input_names_the_field(decode: HttpEngine, verb: str, change: dict, field: str | None) -> None:
    base = {} if verb in ("abort", "release") else GOOD_PREP
    base = {"seq_id": "bad-input"} if verb == "abort" else base
    base = {"begin": 0, **base} if verb == "remote_send" else base
    status, answer = await post(decode, verb, {**base, **change})
    assert 400 <= status < 500, answer
    if field is not None:
        assert answer["error"]["param"] == field
        assert field.split(".")[0] in answer["error"]["message"]


@pytest.mark.parametrize(
    "params",
    [
        {"tercet": 5},
        {"tercet": {"send": {}}},
        {"tercet": {"token": "guess", "seq": {"output": [1] * 5}}},
        {"tercet": {"token": "guess", "send": {"send_id": "x", "lease": "0" * 32, "base": 0, "begin": 0, "end": 3,
                                              "addresses": ["tcp://127.0.0.1:1"], "notify": "tcp://127.0.0.1:1"}}},
    ],
)  # fmt: skip
async def test_clients_of_vllms_own_api_cannot_speak_for_the_edge(decode: HttpEngine, params: dict) -> None:
    prompt = prompt_of(30)
    expected = await alone(decode.url, prompt)
    assert await alone(decode.url, prompt, kv_transfer_params=params) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}'])
async def test_garbage_bodies(decode: HttpEngine, body: bytes) -> None:
    for verb in ("prep_recv", "remote_send", "start_generate", "abort", "release"):
        async with aiohttp.ClientSession() as session, session.post(f"{decode.url}/tercet/v1/{verb}", data=body) as r:
            assert r.status == 400, await r.text()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"begin": 300}, "begin"),
        ({"begin": 301}, "begin"),
        ({"begin": -1}, "begin"),
        ({"end": 301}, "end"),
        ({"end": 100, "sample": True}, "sample"),
        ({"recv_rank": 0}, "recv_rank"),
        ({"prompt": [1] * 400, "end": 350}, "end"),
    ],
)
async def test_bad_ranges_of_remote_send(prefill: HttpEngine, decode: HttpEngine, change: dict, field: str) -> None:
    request = request_of(prompt_of(300))
    async with decode.prep_recv(request) as space:
        call = {"prompt": list(request.prompt), "kv_addr_info": msgspec.to_builtins(space.kv_addr_info),
                "begin": 0, "seq_id": request.seq_id, **change}  # fmt: skip
        status, answer = await post(prefill, "remote_send", call)
    assert status == 400, answer
    assert answer["error"]["param"] == field


@pytest.mark.parametrize(
    "change",
    [
        {"lease": "not hex"},
        {"lease": "ab"},
        {"begin": -128},
        {"begin": 5},
        {"end": 0},
        {"transport": "pigeon"},
        {"ranks": [{"rank": 0, "addresses": []}]},
        {"ranks": [{"rank": 0, "addresses": ["tcp://127.0.0.1:99999"]}]},
        {"ranks": [{"rank": 0, "addresses": ["127.0.0.1:80"]}]},
    ],
    ids=str,
)
async def test_made_up_addresses_are_refused(prefill: HttpEngine, decode: HttpEngine, change: dict) -> None:
    request = request_of(prompt_of(300))
    async with decode.prep_recv(request) as space:
        call = {"prompt": list(request.prompt), "begin": 0, "seq_id": request.seq_id,
                "kv_addr_info": {**msgspec.to_builtins(space.kv_addr_info), **change}}  # fmt: skip
        status, answer = await post(prefill, "remote_send", call)
        assert status == 400, answer
        assert answer["error"]["param"] == "kv_addr_info"
        await prefill.remote_send(request, space, 0)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"block_size": 64}, {"num_layers": 31}, {"num_kv_heads": 8}, {"model": "other"},
     {"tp_size": 3}, {"packing": "cpu-amx"}, {"head_size": 128}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
async def test_mismatch_names_the_difference(prefill: HttpEngine, decode: HttpEngine, change: dict) -> None:
    request = request_of(prompt_of(300))
    async with decode.prep_recv(request) as space:
        info: KVAddrInfo = space.kv_addr_info
        other = msgspec.structs.replace(info, layout=msgspec.structs.replace(info.layout, **change))
        with pytest.raises(LayoutMismatch, match=next(iter(change))):
            await prefill.remote_send(request, Reservation(other, 0), 0)


async def test_seq_id_in_use_is_a_conflict(decode: HttpEngine) -> None:
    request = request_of(prompt_of(200))
    async with decode.prep_recv(request):
        with pytest.raises(Conflict):
            await decode.prep_recv(request).__aenter__()


async def test_another_prompt_than_was_reserved_is_refused(decode: HttpEngine) -> None:
    request = request_of(prompt_of(200))
    async with decode.prep_recv(request):
        other = msgspec.structs.replace(request, prompt=(7, *request.prompt[1:]))
        with pytest.raises(BadRequest, match="position 0"):
            await generate(decode, other)


async def test_the_openapi_description_has_the_verbs(decode: HttpEngine) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{decode.url}/openapi.json") as response:
        paths = (await response.json())["paths"]
    for verb in ("prep_recv", "remote_send", "start_generate", "abort", "release"):
        assert "requestBody" in paths[f"/tercet/v1/{verb}"]["post"]
    assert "get" in paths["/tercet/v1/status"]


# ---- helpers -------------------------------------------------------------------------------------------------


async def post(engine: HttpEngine, verb: str, body: dict) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/tercet/v1/{verb}", json=body) as response,
    ):
        return response.status, await response.json()


async def release(engine: HttpEngine, lease: str) -> None:
    status, answer = await post(engine, "release", {"lease": lease})
    if status == 404:
        raise UnknownSequence(answer["error"]["message"])
    assert status == 200, answer


async def until(holds: Any, engine: HttpEngine) -> None:
    for _ in range(2000):
        if holds(await engine.status()):
            return
        await asyncio.sleep(0.005)
    pytest.fail("the engine did not get there")


async def test_a_background_sequence_is_passed_over_and_ends_with_the_same_tokens(decode: HttpEngine) -> None:
    """While another one's prompt is computed, chunk by chunk, it gets no token but those of steps in flight."""
    prompt, other = prompt_of(120), prompt_of(7 * MAX_BATCHED)
    line = request_of(prompt, background=True, sampling={"max_tokens": 40})
    tokens, began = list[int](), asyncio.Event()

    async def follow() -> None:
        async for item in decode.start_generate(line):
            tokens.extend(item.token_ids)
            if len(tokens) >= 3:
                began.set()

    following = asyncio.ensure_future(follow())
    try:
        await asyncio.wait_for(began.wait(), 60)
        before, at_first, answer = len(tokens), list[int](), list[int]()
        async for item in decode.start_generate(request_of(other)):
            at_first.append(len(tokens))
            answer += item.token_ids
        assert at_first[0] <= before + 3
        await asyncio.wait_for(following, 120)
    finally:
        following.cancel()
    assert answer == await alone(decode.url, other, max_tokens=8)
    assert tokens == await alone(decode.url, prompt, max_tokens=40)
