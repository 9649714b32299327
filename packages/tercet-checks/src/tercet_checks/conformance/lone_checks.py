"""Checks of one engine: its status, generation, leases, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import msgspec

from tercet.protocol import EngineLoad, EngineStatus, Output, OutputStream, SequenceReport
from tercet.protocol.headers import INCARNATION_HEADER
from tercet.protocol.wire import LONGEST_SALT, MSGPACK, PrepRecvAnswer
from tercet.wire.callers import CHALLENGE_HEADER, Prover, digest_of
from tercet.wire.client import StreamListener
from tercet_checks.conformance.trials import OUTPUT_TOKENS, EngineTrial, Skip, check, reserving

LONG_OUTPUT = 400
SHORT_TTL = 0.3
QUICK_SECONDS = 2.0
MOST_LEASES = 500
BODIES: dict[str, dict[str, Any]] = {
    "prep_recv": {"prompt": [300, 301, 302], "seq_id": "wrong"},
    "remote_send": {"prompt": [300, 301, 302], "seq_id": "wrong", "begin": 0, "kv_addr_info": None},
    "start_generate": {"prompt": [300, 301, 302], "seq_id": "wrong"},
    "abort": {"seq_id": "wrong"},
    "release": {"lease": "wrong"},
}
UNKNOWN_LEASE = "0" * 32


# ---- status --------------------------------------------------------------------------------------------------


@check("Report all fields of the table of `status`, with their types; give each start another incarnation.")
async def status(t: EngineTrial) -> None:
    """`status` reports the engine's identity, limits, load and holdings, and the same identity each time."""
    answer = await t.engine.call("status")
    now = answer.decoded(EngineStatus)
    for field in ("engine", "model", "version", "incarnation", "fingerprint", "layout"):
        answer.require(getattr(now, field), f"{field} is empty")
    answer.require(now.block_size >= 1 and now.max_model_len >= 1, "block_size and max_model_len must be at least 1")
    answer.require(0 <= now.free_blocks <= now.total_blocks, "free_blocks must be from 0 to total_blocks")
    answer.require(0 <= now.kv_cache_usage <= 1, "kv_cache_usage must be from 0 to 1")
    answer.require(now.layout and now.layout.block_size == now.block_size, "block_size is not that of the layout")
    again = await t.engine.status()
    answer.require(again.incarnation == now.incarnation, f"the incarnation is now {again.incarnation}")


@check("Count blocks that can be allocated as free, cached ones too. Run the suite on an engine without other callers.")
async def all_is_free_at_rest(t: EngineTrial) -> None:
    """An idle engine holds nothing: no lease, no send, no sequence, and every block can be allocated."""
    await t.engine.generate(t.call())  # whose KV stays in the cache
    await t.until(t.engine, "free_blocks is less than total_blocks", lambda now: now.free_blocks == now.total_blocks)
    answer = await t.engine.call("status")
    now = answer.decoded(EngineStatus)
    answer.require(not (now.leases or now.sends or now.running or now.waiting), "something is held or runs")


@check("Let the core, not the HTTP server, say when it last made a step; answer `status` without waiting for a step.")
async def progress_of_the_core(t: EngineTrial) -> None:
    """While a sequence decodes, `status` answers quickly, counts it as running, and `stalled_s` stays low."""
    async with t.engine.generating(t.call(max_tokens=LONG_OUTPUT)) as stream:
        await stream.take(1)
        began = time.monotonic()
        answer = await t.engine.call("status")
        seconds = time.monotonic() - began
    now = answer.decoded(EngineStatus)
    answer.require(seconds < QUICK_SECONDS, f"it took {seconds:.1f} s, and must take less than {QUICK_SECONDS:g}")
    answer.require(now.running == t.at_start.running + 1, f"running is {now.running} while a sequence decodes")
    answer.require(now.stalled_s < QUICK_SECONDS, f"stalled_s is {now.stalled_s:g} although the core makes progress")


@check("List a sequence from `start_generate` until its end, under the seq_id of its caller.")
async def sequences_are_listed(t: EngineTrial) -> None:
    """`GET sequences` lists what generates, with its tokens, and no longer lists it once it has ended."""
    call = t.call(max_tokens=LONG_OUTPUT)

    async def listed() -> bool:
        answer = await t.engine.call("sequences")
        found = [each for each in answer.decoded(list[SequenceReport]) if each.seq_id == call["seq_id"]]
        tokens = found[0].tokens if found else len(call["prompt"])
        answer.require(tokens >= len(call["prompt"]), f"tokens is {tokens}, less than the prompt has")
        return bool(found)

    async with t.engine.generating(call) as stream:
        await stream.take(1)
        stream.require(await listed(), "the sequence is not in `sequences` while it generates")
    await t.until_given_back(t.engine, t.at_start)
    stream.require(not await listed(), "the sequence is in `sequences` after its end")


@check("Compare the header with the incarnation of `status` before any work.")
async def calls_for_another_start(t: EngineTrial) -> None:
    """A call for another incarnation is refused without effect, and one for this incarnation is served."""
    answer = await t.engine.call("prep_recv", reserving(t.call()), {INCARNATION_HEADER: "of-an-earlier-start"})
    answer.refused(409, "conflict", INCARNATION_HEADER)
    now = await t.engine.call("status", headers={INCARNATION_HEADER: t.at_start.incarnation})
    answer.require(now.decoded(EngineStatus).leases == t.at_start.leases, "the refused call left a lease")


# ---- generation ----------------------------------------------------------------------------------------------


@check("Put the reason into the last output only, and close the stream after it.")
async def streams_end_properly(t: EngineTrial) -> None:
    """`start_generate` needs no `prep_recv`; its stream has all tokens, and a finish_reason in the last output only."""
    stream = await t.engine.generate(t.call())
    stream.require(len(stream.tokens) == OUTPUT_TOKENS, f"{len(stream.tokens)} tokens came for max_tokens 8")
    stream.require(stream.finish_reason == "length", f"finish_reason is {stream.finish_reason!r}, and must be 'length'")


@check("Collect the same outputs into one answer.")
async def one_answer_instead_of_a_stream(t: EngineTrial) -> None:
    """With `stream: false` the answer is one output with the same tokens and the finish_reason."""
    call = t.call()
    tokens = await t.alone(call)
    answer = await t.engine.call("start_generate", {**call, "stream": False})
    output = answer.decoded(Output)
    answer.require(list(output.token_ids) == tokens, f"the tokens of the stream are {tokens}")
    answer.require(output.finish_reason == "length", "finish_reason must be 'length'")


@check("Count prompt and given output once: cached, received under the lease, or computed.")
async def usage_adds_up(t: EngineTrial) -> None:
    """The first output has the usage; cached, received and computed tokens together are prompt and given output."""
    call = t.call()
    stream = await t.engine.generate(call, output=[300, 301])
    usage, total = stream.usage, len(call["prompt"]) + 2
    stream.require(usage.cached + usage.received + usage.computed == total, f"usage must add up to {total}")
    stream.require(usage.received == 0, "tokens count as received, and no KV was sent")
    stream.require(not any(each.usage for each in stream.outputs[1:]), "a later output has a usage, too")


@check("Count `output` for max_tokens, penalties, seeds and grammars, compute its KV, and do not send it again.")
async def output_from_elsewhere(t: EngineTrial) -> None:
    """Tokens given as `output` count as output: only the rest comes, and it is what one engine would have said."""
    call = t.call()
    tokens = await t.alone(call)
    stream = await t.engine.generate(call, output=tokens[:5])
    stream.require(stream.tokens == tokens[5:], f"after {tokens[:5]} must come {tokens[5:]}, came {stream.tokens}")
    answer = await t.engine.call("start_generate", {**t.call(call["prompt"]), "output": tokens})
    answer.refused(400)


@check("Put the salt into the hashes of the prefix cache's blocks.")
async def salts_separate_caches(t: EngineTrial) -> None:
    """A second sequence finds its prompt's whole blocks in the prefix cache; one with another cache_salt finds none."""
    call = t.call()
    await t.engine.generate(call)
    prompt, whole = len(call["prompt"]), (len(call["prompt"]) - 1) // t.block * t.block
    again = await t.engine.generate({**call, "seq_id": t.call()["seq_id"]})
    again.require(whole - t.block <= again.usage.cached <= prompt - 1, f"cached must be {whole} of {prompt} tokens")
    other = await t.engine.generate(t.call(call["prompt"]))
    other.require(other.usage.cached == 0, f"{other.usage.cached} tokens of another salt's cache are used")
    other.require(other.tokens == again.tokens, f"cached KV gives {again.tokens}, computed KV {other.tokens}")


@check("Accept text and tokenize it as the OpenAI API of the engine does.")
async def text_prompts(t: EngineTrial) -> None:
    """A prompt may be text, which the engine tokenizes."""
    call = {**t.call(), "prompt": "Once upon a time there was a router"}
    answer = await t.engine.call("start_generate", {**call, "stream": False})
    answer.require(answer.decoded(Output).token_ids, "no tokens came")


@check("End the sequence when its caller closes the connection; do not wait for its last token.")
async def leaving_ends_a_sequence(t: EngineTrial) -> None:
    """A caller that closes the stream ends the sequence: its blocks are free and it no longer runs."""
    async with t.engine.generating(t.call(max_tokens=LONG_OUTPUT)) as stream:
        await stream.take(2)
    await t.until_given_back(t.engine, t.at_start, QUICK_SECONDS)


@check("End the sequence at once, and its stream with the reason `abort`; accept ids that are unknown, or over.")
async def abort_in_the_middle(t: EngineTrial) -> None:
    """`abort` ends a running sequence: `aborted` is true, its stream ends with the reason `abort`; and then false."""
    call = t.call(max_tokens=LONG_OUTPUT)
    async with t.engine.generating(call) as stream:
        await stream.take(2)
        await t.engine.aborted(call, was_there=True)
        await stream.rest()
    await t.engine.aborted(call, was_there=False)
    said = stream.finish_reason
    stream.require(said == "abort" or stream.error, f"the stream ended with {said!r}, and must end with 'abort'")


@check("Keep the ids of running sequences; refuse a second one before it takes anything.")
async def one_sequence_for_each_id(t: EngineTrial) -> None:
    """A seq_id generates once at a time: a second `start_generate` or `prep_recv` is a conflict, the first goes on."""
    call = t.call(max_tokens=LONG_OUTPUT)
    async with t.engine.generating(call) as stream:
        await stream.take(1)
        (await t.engine.call("start_generate", {**call, "stream": False})).refused(409, "conflict", "seq_id")
        (await t.engine.call("prep_recv", reserving(call))).refused(409, "conflict", "seq_id")
        read = len(stream.tokens)
        await stream.take(read + 1)
    stream.require(len(stream.tokens) > read, "the first sequence ended")


@check("Compute each sequence of a batch as if it were alone.")
async def sequences_at_once(t: EngineTrial) -> None:
    """Sequences that run at the same time get their own tokens, the same as alone."""
    calls = [t.call(t.tokens(t.unit + index)) for index in range(6)]
    alone = [await t.alone(call) for call in calls]
    for call, expected, stream in zip(
        calls, alone, await asyncio.gather(*(t.engine.generate(call) for call in calls)), strict=True
    ):
        stream.require(stream.tokens == expected, f"alone {call['seq_id']} gets {expected}, together {stream.tokens}")


@check("Connect to the address in `connect`, and speak the token stream of docs/verbs.md there.")
async def token_streams(t: EngineTrial) -> None:
    """After `connect`, a sequence with a `router` sends its tokens over the engine's one connection to that router."""
    call, loads = t.call(), list[EngineLoad]()
    expected = await t.alone(call)
    async with StreamListener() as listener:
        connection = listener.connection_of(t.at_start.engine, loads.append)
        router = {"address": await listener.address_for(t.engine.url), "key": connection.key}
        connected = await t.engine.call("connect", {"router": router})
        connected.decoded(dict[str, bool])
        connected.require(connection.connected, "the engine has answered before it was connected")

        async def produce(stream: OutputStream) -> None:
            with connection.sequence(0, stream) as number:
                accepted = await t.engine.call("start_generate", {**call, "router": {**router, "number": number}})
                accepted.require(accepted.decoded(dict[str, bool]) == {"accepted": True}, "it is not accepted")
                await stream.until_over()

        async with asyncio.timeout(t.engine.patience), aclosing(OutputStream(produce)) as outputs:
            tokens = [token async for output in outputs for token in output.token_ids]
        connected.require(tokens == expected, f"by server-sent events come {expected}, by the token stream {tokens}")
        connected.require(loads, "no load came with the tokens")


# ---- leases --------------------------------------------------------------------------------------------------


@check("Take the blocks when the lease begins, count it in `status`, and give both back at its end.")
async def reservations_take_blocks(t: EngineTrial) -> None:
    """`prep_recv` reserves `[matched_len, end)`: the blocks are taken, and `release` gives them back."""
    call = t.call()
    reserved = await t.engine.reserve(call)
    info, prompt = reserved.kv_addr_info, len(call["prompt"])
    answer = await t.engine.call("status")
    now = answer.decoded(EngineStatus)
    answer.require((info.begin, info.end) == (reserved.matched_len, prompt), f"the range is [{info.begin}, {info.end})")
    answer.require(reserved.matched_len == 0, f"matched_len is {reserved.matched_len} for a new prompt")
    answer.require(now.leases == t.at_start.leases + 1, "leases does not count the lease")
    taken, needed = t.at_start.free_blocks - now.free_blocks, -(-prompt // t.block)
    answer.require(taken >= needed, f"{taken} blocks were taken for {prompt} tokens, and {needed} are needed")
    await t.engine.released(reserved)


@check("Resolve `end` once: null is the prompt's length, a negative one counts from it; the range is half-open.")
async def ends_of_ranges(t: EngineTrial) -> None:
    """`end` is exclusive, null is the whole prompt, -1 all but its last token; an empty or longer range is refused."""
    call = t.call()
    length = len(call["prompt"])
    for end, expected in ((None, length), (length, length), (-1, length - 1), (t.unit + 1, t.unit + 1)):
        reserved = await t.engine.reserve(call, end=end)
        answer = await t.engine.release(reserved)
        found = reserved.kv_addr_info.end
        answer.require(found == expected, f"end {end} of {length} tokens became {found}, and must be {expected}")
    for end in (0, length + 1, -length, -length - 1):
        (await t.engine.call("prep_recv", reserving(call, end=end))).refused(400, "bad_request", "end")


@check("Match whole blocks of `prompt[:end]` in the prefix cache, and pin them under the lease.")
async def matched_length_of_a_known_prompt(t: EngineTrial) -> None:
    """`matched_len` is how much of the prompt is cached, in whole blocks; the reservation begins there."""
    call = t.call()
    await t.engine.generate(call)
    reserved = await t.engine.reserve(call)
    answer = await t.engine.release(reserved)
    whole = len(call["prompt"]) // t.block * t.block
    answer.require(reserved.matched_len == whole, f"matched_len was {reserved.matched_len}, and {whole} are cached")
    answer.require(reserved.kv_addr_info.begin == whole, f"begin was {reserved.kv_addr_info.begin}, not matched_len")
    other = await t.engine.reserve(t.call(call["prompt"]))
    answer = await t.engine.release(other)
    answer.require(other.matched_len == 0, f"with another salt, matched_len was {other.matched_len}")


@check("Refuse a second reservation of a sequence; the first lease stays as it is.")
async def one_lease_for_each_id(t: EngineTrial) -> None:
    """A seq_id has at most one lease: a second `prep_recv` is a conflict, and the first lease stays."""
    first = await t.engine.reserve(call := t.call())
    (await t.engine.call("prep_recv", reserving(call))).refused(409, "conflict", "seq_id")
    await t.engine.released(first)


@check("End the lease by a timer, `ttl` seconds after its last sign of life; the caller may only shorten it.")
async def leases_expire(t: EngineTrial) -> None:
    """A lease ends by itself after its `ttl`, which the call may shorten and not lengthen; its blocks are free then."""
    long = await t.engine.reserve(t.call(), ttl=10_000_000)
    answer = await t.engine.release(long)
    answer.require(long.ttl < 10_000_000, "a ttl of 10,000,000 s was granted")
    short = await t.engine.reserve(t.call(), ttl=SHORT_TTL)
    answer.require(short.ttl == SHORT_TTL, f"the ttl is {short.ttl:g}, and {SHORT_TTL:g} was asked for")
    await t.until_given_back(t.engine, t.at_start, SHORT_TTL + QUICK_SECONDS)
    (await t.engine.release(short)).refused(404, "unknown_sequence")


@check("Forget a lease when it ends; its name is never valid again.")
async def double_release(t: EngineTrial) -> None:
    """A lease ends once: a second `release`, and one of an unknown lease, are a 404."""
    reserved = await t.engine.reserve(t.call())
    await t.engine.released(reserved)
    (await t.engine.release(reserved)).refused(404, "unknown_sequence")
    (await t.engine.call("release", {"lease": UNKNOWN_LEASE})).refused(404, "unknown_sequence")


@check("Let `abort` end the lease of the sequence, too.")
async def abort_ends_a_lease(t: EngineTrial) -> None:
    """`abort` ends the sequence's lease: `aborted` is true, and the lease is unknown then."""
    call = t.call()
    reserved = await t.engine.reserve(call)
    await t.engine.aborted(call, was_there=True)
    (await t.engine.release(reserved)).refused(404, "unknown_sequence")


@check("Keep name and blocks, take more; refuse a shorter prompt, other tokens and another sequence without effect.")
async def leases_are_extended(t: EngineTrial) -> None:
    """`prep_recv` with `lease` lengthens an open lease to a longer prompt; nothing else, and no lease that is over."""
    whole = t.call()
    part = {**whole, "prompt": whole["prompt"][: t.unit]}
    reserved = await t.engine.reserve(part)
    lease, longest = reserved.kv_addr_info.lease, len(whole["prompt"])
    wrong = {**part, "prompt": [whole["prompt"][0] + 1, *whole["prompt"][1:]]}
    for call, statuses, code, param in (
        (wrong, 400, "bad_request", "prompt"),
        ({**whole, "end": t.unit - 1}, 400, "bad_request", ""),
        ({**whole, "seq_id": "another"}, 404, "unknown_sequence", ""),
        ({**whole, "cache_salt": "another"}, 400, "bad_request", "cache_salt"),
    ):
        (await t.engine.call("prep_recv", reserving(call, lease=lease))).refused(statuses, code, param)
    more = await t.engine.reserve(whole, lease=lease)
    answer = await t.engine.call("status")
    info, now = more.kv_addr_info, answer.decoded(EngineStatus)
    answer.require((info.lease, info.end) == (lease, longest), f"{info.lease} up to {info.end} is not {lease}")
    taken, needed = t.at_start.free_blocks - now.free_blocks, -(-longest // t.block)
    answer.require(taken >= needed, f"{taken} blocks are taken for {longest} tokens, and {needed} are needed")
    await t.engine.released(more)
    (await t.engine.call("prep_recv", reserving(whole, lease=lease))).refused((404, 410))


@check("Let the sequence take its lease over; afterwards the lease is unknown.")
async def generation_takes_the_lease(t: EngineTrial) -> None:
    """`start_generate` uses up the lease of its seq_id; what did not arrive is computed, whatever `begin` says."""
    call = t.call()
    reserved = await t.engine.reserve(call)
    await t.decodes(t.engine, call, received=0, begin=len(call["prompt"]))
    (await t.engine.release(reserved)).refused(404, "unknown_sequence")


@check("Compare tokens and salt of `start_generate` with those of `prep_recv`, up to the lease's end.")
async def generation_of_another_prompt(t: EngineTrial) -> None:
    """`start_generate` with other tokens or another salt than its lease is refused, and the lease stays."""
    call = t.call()
    reserved = await t.engine.reserve(call)
    other = [*call["prompt"][:-1], call["prompt"][-1] + 1]
    (await t.engine.call("start_generate", {**call, "prompt": other})).refused(400, "bad_request", "prompt")
    salted = {**call, "cache_salt": "another"}
    (await t.engine.call("start_generate", salted)).refused(400, "bad_request", "cache_salt")
    await t.engine.released(reserved)


@check("Limit the blocks of all leases together; take none for a reservation that is refused.")
async def no_space_is_said(t: EngineTrial) -> None:
    """Leases cannot take the whole cache: the one that is too much is refused with no_space and takes nothing."""
    length = min(t.at_start.max_model_len - 1, t.at_start.total_blocks * t.block)
    prompt, leases = t.tokens(length), list[PrepRecvAnswer]()
    try:
        while len(leases) < MOST_LEASES:
            before = await t.engine.status()
            answer = await t.engine.call("prep_recv", reserving(t.call(prompt)))
            if answer.status != 200:
                answer.refused(503, "no_space")
                await t.until_given_back(t.engine, before)
                return
            leases.append(answer.decoded(PrepRecvAnswer))
        raise Skip(f"{MOST_LEASES} leases of {length} tokens do not fill the cache")
    finally:
        for lease in leases:
            await t.engine.release(lease)


# ---- what is refused -----------------------------------------------------------------------------------------


@check("Answer 400 with the error form for every body that cannot be read.")
async def garbage_bodies(t: EngineTrial) -> None:
    """A body that is not JSON, not UTF-8, not an object or empty is a 400 in the form of OpenAI's errors."""
    for verb in BODIES:
        for body in (b"", b"{", b"nonsense", b'"text"', b"[]", b'{"seq_id": "\xff"}', b'{"seq_id": "\\ud800"}'):
            (await t.engine.call(verb, body)).refused(400, "bad_request")


@check("Check bodies against the schema of the verb; `param` names the field.")
async def wrong_fields_are_named(t: EngineTrial) -> None:
    """An unknown field, a missing one and one of a wrong type are a 400 that names the field."""
    for verb, body in BODIES.items():
        name = "lease" if verb == "release" else "seq_id"
        (await t.engine.call(verb, {"nonsense": 1, **body})).refused(400, "bad_request", "nonsense")
        (await t.engine.call(verb, {name: 5})).refused(400, "bad_request", name)
        if verb != "remote_send":  # whose other missing field may be named
            missing = {key: value for key, value in body.items() if key != name}
            (await t.engine.call(verb, missing)).refused(400, "bad_request", name)


@check("Check every value at the entrance: `param` names the field that has a wrong one.")
async def wrong_values_are_named(t: EngineTrial) -> None:
    """Values outside their limits are a 400 that names the field, and leave nothing behind."""
    call, longest = t.call(), [300] * (t.at_start.max_model_len + 1)
    wrong: list[tuple[str, str, Any]] = [
        ("prep_recv", "prompt", []), ("prep_recv", "prompt", [-1]), ("prep_recv", "prompt", [2**31]),
        ("prep_recv", "prompt", longest), ("prep_recv", "ttl", 0), ("prep_recv", "seq_id", ""),
        ("prep_recv", "seq_id", "x" * 257), ("prep_recv", "cache_salt", "x" * (LONGEST_SALT + 1)),
        ("start_generate", "prompt", []), ("start_generate", "prompt", longest), ("start_generate", "begin", -1),
        ("start_generate", "begin", len(call["prompt"]) + 1), ("start_generate", "output", [-1]),
        ("start_generate", "sampling_params", 5),
    ]  # fmt: skip
    for verb, field, value in wrong:
        (await t.engine.call(verb, reserving(call, **{field: value}))).refused(400, "bad_request", field)


@check("Refuse adapters that the engine does not have; never compute with the base model instead.")
async def unknown_adapters(t: EngineTrial) -> None:
    """A call for an adapter that the engine lacks is a 404 that says so."""
    for verb in ("prep_recv", "start_generate"):
        (await t.engine.call(verb, reserving(t.call(), adapter="none"))).refused(404, "unknown_adapter", "adapter")


@check("Read application/json and application/msgpack, and answer 415 to other types and encodings.")
async def types_of_bodies(t: EngineTrial) -> None:
    """Calls are JSON or MessagePack with the same names; other content types and encodings are a 415."""
    call = t.call()
    answer = await t.engine.call("prep_recv", msgspec.msgpack.encode(reserving(call)), {"content-type": MSGPACK})
    await t.engine.released(answer.decoded(PrepRecvAnswer))
    for header, value in (("content-type", "application/xml"), ("content-encoding", "gzip")):
        answer = await t.engine.call("abort", b"{}", {header: value})
        answer.refused(415, "unsupported_media_type", header)


@check("Without a secret, refuse calls with an Origin of another site: a web page must not command engines.")
async def web_pages_are_refused(t: EngineTrial) -> None:
    """Without a secret, a call that a web page makes a browser send is a 403."""
    if t.engine.secret:
        raise Skip("the engine requires a secret, which no page has")
    answer = await t.engine.call("abort", BODIES["abort"], {"origin": "http://page.example"})
    answer.refused(403, "forbidden")


@check("Check the caller before its body is read, on every route below /tercet/v1; compare keys in constant time.")
async def strangers_are_refused(t: EngineTrial) -> None:
    """Without the secret, with a wrong one, or with a proof of a wrong one, every route is a 401 with a challenge."""
    prover = Prover(f"not {_secret_of(t)}")
    for verb, body in (*BODIES.items(), ("connect", {}), ("status", None), ("sequences", None)):
        for key in ("", "Bearer ", "Bearer wrong"):
            answer = await t.engine.call(verb, body, {"authorization": key})
            answer.refused(401, "unauthorized")
        challenge = answer.headers.get(CHALLENGE_HEADER, "")
        answer.require(challenge, f"the answer has no {CHALLENGE_HEADER}, and so no caller can prove the secret")
        prover.meets([challenge])
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        proof = prover.headers(method, f"/{verb}", digest_of(data))
        (await t.engine.call(verb, data, proof)).refused(401, "unauthorized")


@check("Accept a proof once, for the method, path and body that were signed.")
async def proofs_are_for_one_call(t: EngineTrial) -> None:
    """A proof of the secret opens one call: not a second one, and not one with another body or path."""
    prover, body = Prover(_secret_of(t)), msgspec.json.encode({"seq_id": t.call()["seq_id"]})
    refused = await t.engine.call("abort", body, {"authorization": ""})
    prover.meets([refused.headers.get(CHALLENGE_HEADER, "")])
    proof = prover.headers("POST", "/abort", digest_of(body))
    (await t.engine.call("abort", body, proof)).decoded(dict[str, bool])
    (await t.engine.call("abort", body, proof)).refused(401, "unauthorized")
    proof = prover.headers("POST", "/abort", digest_of(body))
    (await t.engine.call("abort", body.replace(b"}", b" }"), proof)).refused(401, "unauthorized")
    proof = prover.headers("POST", "/abort", digest_of(body))
    (await t.engine.call("release", body, proof)).refused(401, "unauthorized")


def _secret_of(t: EngineTrial) -> str:
    if not t.engine.secret:
        raise Skip("needs an engine with a secret: --secret")
    return t.engine.secret
