"""Checks of two engines: KV that goes from one to the other, and all that may happen on its way.

The engine under test receives unless a check says otherwise.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from tercet.protocol import EngineStatus, Sent, TercetError
from tercet.protocol.wire import PrepRecvAnswer, ReleaseAnswer
from tercet_checks.conformance.lone_checks import LONG_OUTPUT, QUICK_SECONDS, SHORT_TTL, UNKNOWN_LEASE
from tercet_checks.conformance.trials import Call, EngineTrial, EngineUnderTest, Skip, VerbAnswer
from tercet_checks.conformance.trials import check as any_check

check = partial(any_check, needs_peer=True)
# What a sender answers if the receiver refuses its KV, or ended the lease, or the sequence was aborted.
NOT_ARRIVED = (404, 409, 410, 502)
# A lease whose renewal is tested: a send must take less than half of it.
RENEWED_TTL = 2.0
LONGEST_SEND = 6000


async def moved(t: EngineTrial, sender: EngineUnderTest, receiver: EngineUnderTest, call: Call) -> None:
    """Prefill a prompt on one engine but for its last token, decode on the other, and compare with it alone."""
    length, reserved = len(call["prompt"]), await receiver.reserve(call, end=-1)
    answer = await sender.send(call, reserved, 0)
    sent = answer.decoded(Sent)
    answer.require((sent.begin, sent.end) == (0, length - 1), f"[{sent.begin}, {sent.end}) was sent of {length} tokens")
    answer.require(sent.bytes > 0 and sent.chunks > 0, "bytes and chunks must be more than 0")
    done = sent.usage.cached + sent.usage.computed
    answer.require(done == length - 1, f"the sender's usage must add up to {length - 1}")
    await t.decodes(receiver, call, received=length - 1, begin=sent.end)


@check("Load the same weights and data type on both engines, and report the same layout for KV that can be exchanged.")
async def two_engines_of_one_model(t: EngineTrial) -> None:
    """The two engines are different starts of the same model: equal tokens at temperature 0, layouts that match."""
    answer = await t.peer.call("status")
    theirs, ours = answer.decoded(EngineStatus), await t.engine.status()
    answer.require(theirs.incarnation != ours.incarnation, "both URLs are one engine")
    if ours.layout and theirs.layout:
        try:
            ours.layout.require_mappable(theirs.layout, theirs.engine)
        except TercetError as error:
            answer.require(False, error.message)
    call = t.call()
    here, there = await t.alone(call), await t.alone(call, t.peer)
    answer.require(here == there, f"the engine says {here}, its peer {there}: use float32, where batches do not matter")


@check("Write what arrives into the reserved blocks, and let the sequence decode on them.")
async def kv_arrives(t: EngineTrial) -> None:
    """The peer prefills, this engine decodes on the KV that arrived: all received, one token computed, equal tokens."""
    await moved(t, t.peer, t.engine, t.call())


@check("Push all whole and partial blocks of `[begin, end)`, and answer when every byte is acknowledged.")
async def kv_leaves(t: EngineTrial) -> None:
    """This engine prefills and sends, the peer decodes on it with equal tokens; the answer says what was sent."""
    await moved(t, t.engine, t.peer, t.call())


@check("Keep transfers apart by their leases.")
async def transfers_at_once(t: EngineTrial) -> None:
    """Several sequences in transfer at once, in both directions, each get their own KV."""
    calls = [t.call(t.tokens(t.unit + 1 + index)) for index in range(6)]
    ways = [(t.peer, t.engine), (t.engine, t.peer)]
    await asyncio.gather(*(moved(t, *ways[index % 2], call) for index, call in enumerate(calls)))


@check("Sample the first token with the last chunk of the prefill; it is output number 0 of the sequence.")
async def first_token_with_the_send(t: EngineTrial) -> None:
    """With `sample` the sender returns the first token; the receiver, given it as output, goes on with the second."""
    call = t.call()
    expected = await t.alone(call)
    for sender, receiver in ((t.engine, t.peer), (t.peer, t.engine)):
        again = t.call(call["prompt"])
        reserved = await receiver.reserve(again)
        answer = await sender.send(again, reserved, 0, sample=True)
        first = answer.decoded(Sent).first
        answer.require(first and list(first.token_ids) == expected[:1], f"first must be the token {expected[0]}")
        answer.require(first and first.finish_reason is None, "first has a finish_reason, and 8 tokens are wanted")
        await t.decodes(receiver, again, len(call["prompt"]), expected[:1], len(call["prompt"]))
    reserved = await t.peer.reserve(call)
    (await t.engine.send(call, reserved, 0, t.unit, sample=True)).refused(400, "bad_request", "sample")
    await t.peer.released(reserved)


@check("With `cached_only` send the longest cached whole blocks of the range, compute nothing, and answer their end.")
async def cached_kv_alone(t: EngineTrial) -> None:
    """With `cached_only` a send computes nothing and ends at the last cached whole block, at any `end` of the range."""
    length, known = 3 * t.unit + 7, 2 * t.unit
    for cached, begin, end in (
        (length, 0, length), (length, 0, -1), (length, 0, known), (length, 0, known + 3), (length, t.unit, -2),
        (known, 0, length), (known, known, length), (known, known + 1, length), (0, 0, length),
    ):  # fmt: skip
        call = t.call(t.tokens(length))
        names = {"prompt": call["prompt"][:cached], "seq_id": t.call()["seq_id"]}
        if cached:
            await t.engine.generate({**call, **names})
        reserved = await t.peer.reserve(call)
        last = max(begin, min(cached, end + length if end < 0 else end) // t.block * t.block)
        answer = await t.engine.send(call, reserved, begin, end, cached_only=True)
        sent = answer.decoded(Sent)
        answer.require((sent.begin, sent.end) == (begin, last), f"[{sent.begin}, {sent.end}) was sent, not to {last}")
        answer.require(sent.usage.computed == 0 and (sent.bytes > 0) == (last > begin), "only cached KV must be sent")
        again = await t.engine.reserve({**call, "seq_id": t.call()["seq_id"]})
        released = await t.engine.release(again)
        computed = again.matched_len > cached // t.block * t.block
        released.require(not computed, f"{cached} tokens were cached, and after the send {again.matched_len} are")
        await t.decodes(t.peer, call, received=0 if begin else last, begin=last)
    reserved = await t.peer.reserve(call := t.call())
    answer = await t.engine.send(call, reserved, 0, cached_only=True, sample=True)
    answer.refused(400, "bad_request", "cached_only")
    await t.peer.released(reserved)


@check("Treat ranges as half-open, and count tokens as received only without a gap from the start.")
async def parts_of_a_prompt(t: EngineTrial) -> None:
    """Two sends fill a reservation, `[0, k)` and `[k, end)`. With one of them alone only tokens before a gap count."""
    last = 3 * t.unit + 6
    for parts, received in (([(0, t.unit), (t.unit, last)], last), ([(0, t.unit)], t.unit), ([(t.unit, last)], 0)):
        reserved = await t.engine.reserve(call := t.call(), end=-1)
        for begin, end in parts:
            await t.peer.sent(call, reserved, begin, end)
        await t.decodes(t.engine, call, received, begin=parts[-1][1])


@check("Check the range against the prompt and the reservation before anything is computed.")
async def ranges_of_sends(t: EngineTrial) -> None:
    """A send of no token, of a negative begin, or outside the reservation is a 400; a negative end counts backwards."""
    call = t.call()
    length = len(call["prompt"])
    reserved = await t.peer.reserve(call, end=-1)
    for begin, end, field in (
        (t.unit, t.unit, "begin"), (t.unit + 1, t.unit, "begin"), (-1, length - 1, "begin"), (0, length, "end"),
        (0, length + 1, "end"), (0, -length, "begin"),
    ):  # fmt: skip
        (await t.engine.send(call, reserved, begin, end)).refused(400, "bad_request", field)
    answer = await t.engine.send(call, reserved, 0, -2)
    sent = answer.decoded(Sent)
    answer.require(sent.end == length - 2, f"the end -2 of {length} tokens became {sent.end}")
    await t.peer.released(reserved)


@check("Make received KV ordinary prefix cache, with the hashes that computed KV would have.")
async def received_kv_is_prefix_cache(t: EngineTrial) -> None:
    """What arrived and was released stays as prefix cache: matched for the same salt, used by other sequences."""
    call = t.call(t.tokens(3 * t.unit))
    length = len(call["prompt"])
    reserved = await t.engine.reserve(call)
    await t.peer.sent(call, reserved, 0)
    answer = await t.engine.release(reserved)
    valid = answer.decoded(ReleaseAnswer).valid_end
    answer.require(valid == length, f"valid_end is {valid}, and {length} tokens arrived")
    again = await t.engine.reserve(call)
    matched = await t.engine.release(again)
    matched.require(again.matched_len == length, f"matched_len was {again.matched_len}, and {length} tokens arrived")
    longer = {**call, "prompt": [*call["prompt"], *t.tokens(5)], "seq_id": t.call()["seq_id"]}
    stream = await t.decodes(t.engine, longer, received=None)
    stream.require(stream.usage.cached == length, f"{length} tokens must be cached")
    other = await t.engine.reserve(t.call(call["prompt"]))
    matched = await t.engine.release(other)
    matched.require(other.matched_len == 0, f"with another salt, matched_len was {other.matched_len}")


@check("Compare the hash of tokens, salt and adapter that a sender names with the lease's, before a byte is written.")
async def kv_of_other_contents(t: EngineTrial) -> None:
    """KV of other tokens or of another salt than the lease's is refused, and none of it is used."""
    reserved = await t.engine.reserve(call := t.call(), end=-1)
    others: list[dict[str, Any]] = [
        {"prompt": [call["prompt"][0] + 1, *call["prompt"][1:]]},
        {"prompt": [*call["prompt"][:-2], call["prompt"][-2] + 1, 300]},
        {"cache_salt": "another"},
    ]
    for change in others:
        (await t.peer.send({**call, **change}, reserved, 0)).refused((400, *NOT_ARRIVED))
    await t.decodes(t.engine, call, received=0, begin=len(call["prompt"]) - 1)


@check("Look the lease up for each write; refuse what names none.")
async def kv_for_a_wrong_lease(t: EngineTrial) -> None:
    """KV for a lease that the receiver has not granted is refused, and another lease gets none of it."""
    call = t.call()
    reserved = await t.engine.reserve(call)
    info = msgspec.structs.replace(reserved.kv_addr_info, lease=UNKNOWN_LEASE)
    wrong = msgspec.structs.replace(reserved, kv_addr_info=info)
    (await t.peer.send(call, wrong, 0)).refused((401, *NOT_ARRIVED))
    answer = await t.engine.release(reserved)
    valid = answer.decoded(ReleaseAnswer).valid_end
    answer.require(valid == 0, f"valid_end is {valid}, and no KV was sent under this lease")


@check("Refuse what arrives for a lease that is over: its blocks may belong to another sequence by now.")
async def late_writes(t: EngineTrial) -> None:
    """KV that arrives after a lease was released, has expired or was aborted is refused; the sender gets an error."""

    async def release(call: Call, reserved: PrepRecvAnswer) -> None:
        await t.engine.released(reserved)

    async def abort(call: Call, reserved: PrepRecvAnswer) -> None:
        await t.engine.aborted(call, was_there=True)

    async def expire(call: Call, reserved: PrepRecvAnswer) -> None:
        await t.until(t.engine, "the lease has not expired", lambda now: now.leases == t.at_start.leases)

    for end, ttl in ((release, None), (abort, None), (expire, SHORT_TTL)):
        call = t.call()
        reserved = await t.engine.reserve(call, ttl=ttl)
        await end(call, reserved)
        (await t.peer.send(call, reserved, 0)).refused(NOT_ARRIVED)
        again = await t.engine.reserve(call)
        answer = await t.engine.release(again)
        answer.require(again.matched_len == 0, f"{again.matched_len} tokens of the refused KV are in the cache")


@check("Start the lease's timer again whenever KV arrives under it.")
async def kv_renews_a_lease(t: EngineTrial) -> None:
    """KV that arrives is a sign of life: the lease ends `ttl` seconds after the last of it."""
    call = t.call()
    reserved = await t.engine.reserve(call, ttl=RENEWED_TTL)
    await asyncio.sleep(RENEWED_TTL / 2)
    await t.peer.sent(call, reserved, 0, t.unit)
    await asyncio.sleep(RENEWED_TTL * 0.75)
    answer = await t.engine.release(reserved)
    answer.require(answer.status == 200, f"the lease of {RENEWED_TTL:g} s is over although KV came in between")


async def sending(t: EngineTrial, sender: EngineUnderTest, receiver: EngineUnderTest) -> tuple[Any, Any, Any]:
    """Begin a long send, and return when the sender's status counts it: the call, the reservation, the running send."""
    call = t.call(t.tokens(min(t.at_start.max_model_len - 1, LONGEST_SEND, t.at_start.total_blocks // 2 * t.block)))
    reserved, before = await receiver.reserve(call), await sender.status()
    running = asyncio.ensure_future(sender.send(call, reserved, 0))
    await t.until(sender, "`sends` does not count a send", lambda now: now.sends > before.sends or running.done())
    if running.done():
        answer = running.result()
        await receiver.release(reserved)
        answer.decoded(dict[str, Any])
        raise Skip(f"a send of {len(call['prompt'])} tokens ends before `status` shows it")
    return call, reserved, running


@check("End the send when its sequence is aborted, and give back what it pinned.")
async def abort_of_a_send(t: EngineTrial) -> None:
    """`abort` at the sender ends a running send: `remote_send` fails, and the sender gives all back."""
    call, reserved, running = await sending(t, t.engine, t.peer)
    aborted = await t.engine.call("abort", {"seq_id": call["seq_id"]})
    answer: VerbAnswer = await running
    if aborted.decoded(dict[str, bool]) == {"aborted": False}:
        answer.decoded(dict[str, Any])  # the send had ended before
    else:
        answer.refused((*NOT_ARRIVED, 500))
    await t.until_given_back(t.engine, t.at_start)
    await t.peer.released(reserved)


@check("End the lease at once, refuse the rest of the KV, and free the blocks when no rank writes any more.")
async def abort_while_kv_arrives(t: EngineTrial) -> None:
    """`abort` at the receiver ends the lease while KV arrives: the sender gets an error, and all blocks are free."""
    call, _, running = await sending(t, t.peer, t.engine)
    await t.engine.aborted(call, was_there=True)
    (await running).refused(NOT_ARRIVED)
    await t.until_given_back(t.engine, t.at_start)


@check("End a send when its caller closes the connection; what has arrived by then is valid, nothing else is.")
async def a_sender_that_goes_away(t: EngineTrial) -> None:
    """A send that breaks off leaves no lie: the sender gives all back, and the receiver decodes the right tokens."""
    for sender, receiver in ((t.engine, t.peer), (t.peer, t.engine)):
        call, _, running = await sending(t, sender, receiver)
        running.cancel()
        await asyncio.wait({running})
        gone = "the send goes on although its caller has left"
        await t.until(sender, gone, lambda now: now.sends == 0, within=QUICK_SECONDS)
        await t.decodes(receiver, call, received=None, begin=len(call["prompt"]))


@check("Send the KV of a running sequence from its blocks; count given output; begin where the tokens stopped.")
async def running_sequences_move(t: EngineTrial) -> None:
    """A running sequence moves: `prompt + output` is sent while it decodes, and the other engine says the rest."""
    for source, destination in ((t.engine, t.peer), (t.peer, t.engine)):
        call = t.call(max_tokens=LONG_OUTPUT)
        async with source.generating(call) as stream:
            await stream.take(10)
            known = [*call["prompt"], *stream.tokens[:10]]
            grown: Call = {**call, "prompt": known, "sampling_params": {}}
            reserved = await destination.reserve(grown, end=-1)
            await source.sent(grown, reserved, 0)
            await source.aborted(call, was_there=True)
        shorter = {**call, "sampling_params": {**call["sampling_params"], "max_tokens": 24}}
        await t.decodes(destination, shorter, len(known) - 1, known[len(call["prompt"]) :])


@check("Extend the lease that holds KV: what arrived stays, `matched_len` says how much of it, in whole blocks.")
async def kv_under_an_extended_lease(t: EngineTrial) -> None:
    """After a part was sent, the lease is extended and only the rest is sent; the sequence decodes on both."""
    call = t.call()
    length = len(call["prompt"])
    part = {**call, "prompt": call["prompt"][: 2 * t.unit]}
    reserved = await t.engine.reserve(part)
    await t.peer.sent(part, reserved, 0)
    more = await t.engine.reserve(call, lease=reserved.kv_addr_info.lease, end=-1)
    await t.peer.sent(call, more, 2 * t.unit)
    stream = await t.decodes(t.engine, call, received=length - 1, begin=length - 1)
    stream.require(more.matched_len in (0, 2 * t.unit), f"matched_len is {more.matched_len} after the extension")


@check("Compare the layouts before anything is computed, and check every value of the address.")
async def layouts_that_do_not_match(t: EngineTrial) -> None:
    """A reservation with another layout is a layout_mismatch, and one that no engine issued a 400 or 401."""
    call = t.call()
    reserved = await t.peer.reserve(call)
    info = reserved.kv_addr_info
    other = msgspec.structs.replace(info.layout, num_layers=info.layout.num_layers + 1)
    for change, statuses in (
        ({"layout": other}, (409, 401)), ({"transport": "pigeon"}, (400, 401)), ({"ranks": ()}, (400, 401)),
    ):  # fmt: skip
        wrong = msgspec.structs.replace(reserved, kv_addr_info=msgspec.structs.replace(info, **change))
        (await t.engine.send(call, wrong, 0)).refused(statuses)
    for garbage in (5, {}, {"lease": info.lease}):
        body = {**call, "kv_addr_info": garbage, "begin": 0}
        (await t.engine.call("remote_send", body)).refused(400, "bad_request")
    await t.peer.released(reserved)
