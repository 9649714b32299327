"""The simulated engine's verbs: times that can be worked out by hand, and what is given back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from msgspec import structs

from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineUnreachable,
    LayoutMismatch,
    NoSpace,
    Output,
    Request,
    TransferFailed,
    UnknownSequence,
    Usage,
)
from tercet_lab.sim import run_virtual
from tercet_lab.sim.step_times import StepTimes
from tests.virtual_time import in_virtual_time

from .models import KV_BYTES, collect, engines_of, is_empty, profile_of, request_of, tokens_of


def now() -> float:
    return asyncio.get_running_loop().time()


def prefill(tokens: int) -> float:
    """Seconds of a step of the plain profile."""
    return 0.010 + 0.001 * (tokens - 1)


# ---- start_generate ------------------------------------------------------------------------------------------


@in_virtual_time
async def test_first_token_after_the_prefill_then_one_per_step() -> None:
    (engine,) = engines_of("a", stream_every=1)
    times, outputs = list[float](), list[Output]()
    async for output in engine.start_generate(request_of("s", 100, 5)):
        times.append(now())
        outputs.append(output)
    assert times == pytest.approx([prefill(100) + index * 0.010 for index in range(5)])
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert outputs[0].usage == Usage(computed=100)
    assert is_empty(engine)


@in_virtual_time
async def test_a_coarse_stream_is_on_time_at_both_ends() -> None:
    fine, coarse = engines_of("fine", stream_every=1)[0], engines_of("coarse")[0]
    wanted = await tokens_of(fine, request_of("s", 100, 50))
    began, times, tokens = now(), list[float](), list[int]()

    def take(output: Output) -> None:
        times.append(now() - began)
        tokens.extend(output.token_ids)

    await coarse.start_generate(request_of("s", 100, 50)).run(take)
    assert times == pytest.approx([prefill(100), prefill(100) + 49 * 0.010])
    assert tokens == wanted


@pytest.mark.parametrize("every", [0, 1])
@in_virtual_time
async def test_who_iterates_over_a_stream_gets_each_token_when_it_comes(every: int) -> None:
    (engine,) = engines_of("a", stream_every=every)
    assert await _times(engine, request_of("s", 100, 6)) == pytest.approx(
        [prefill(100) + index * 0.010 for index in range(6)]
    )


@in_virtual_time
async def test_a_stream_that_is_left_early_ends_the_work_at_that_token() -> None:
    (engine,) = engines_of("a")
    async with aclosing(aiter(engine.start_generate(request_of("s", 100, 50)))) as outputs:
        async for _ in outputs:
            if now() > prefill(100) + 0.025:
                break
    assert now() == pytest.approx(prefill(100) + 0.030)
    await asyncio.sleep(0.02)
    assert is_empty(engine)


@in_virtual_time
async def test_a_long_prompt_is_computed_in_chunks() -> None:
    (engine,) = engines_of("a", max_num_batched_tokens=64, max_num_seqs=8)
    await tokens_of(engine, request_of("s", 150, 1))
    assert now() == pytest.approx(prefill(64) * 2 + prefill(22))


def test_what_arrives_at_one_moment_is_computed_together() -> None:
    async def main() -> None:
        (engine,) = engines_of("a", max_num_batched_tokens=80, max_num_seqs=8, prefix_caching=False)

        async def end_of(seq_id: str) -> float:
            await tokens_of(engine, request_of(seq_id, 50, 1))
            return now()

        # 50 + 30 tokens, then 20 + 50; if the first one were computed alone, three steps.
        ends = await asyncio.gather(*map(end_of, ("s", "t", "u")))
        assert ends == pytest.approx([prefill(80), *[prefill(80) + prefill(70)] * 2])
        assert engine.load().step_time != 0
        assert is_empty(engine)

    run_virtual(main())


@in_virtual_time
async def test_chunked_decodes_go_on_while_another_prompt_is_computed() -> None:
    (engine,) = engines_of("a", stream_every=1)
    first = asyncio.create_task(_times(engine, request_of("one", 1, 4)))
    await asyncio.sleep(0.015)  # in the first decode step, which ends at 0.020
    await tokens_of(engine, request_of("two", 100, 1, first=500))
    # The shared step computes 100 prompt tokens and one decode.
    assert await first == pytest.approx([0.010, 0.020, 0.020 + prefill(101), 0.020 + prefill(101) + 0.010])


@in_virtual_time
async def test_prefill_first_makes_decodes_wait() -> None:
    (engine,) = engines_of("a", stream_every=1, schedule="prefill_first")
    first = asyncio.create_task(_times(engine, request_of("one", 1, 4)))
    await asyncio.sleep(0.015)
    await tokens_of(engine, request_of("two", 100, 1, first=500))
    assert now() == pytest.approx(0.020 + prefill(100))
    assert await first == pytest.approx([0.010, 0.020, 0.030 + prefill(100), 0.040 + prefill(100)])


async def _times(engine, request: Request) -> list[float]:  # type: ignore[no-untyped-def]
    return [now() async for _ in engine.start_generate(request)]


@in_virtual_time
async def test_contexts_make_steps_longer() -> None:
    times = StepTimes(knots=((1, 0.010), (2, 0.010)), pair=0.0, context=0.001)
    (engine,) = engines_of("a", profile=profile_of(times))
    await tokens_of(engine, request_of("s", 32, 4))
    # The prefill, and decodes that read 33, 34 and 35 tokens.
    assert now() == pytest.approx(0.010 + 3 * 0.010 + 0.001 * (33 + 34 + 35))


@in_virtual_time
async def test_a_cached_prefix_is_not_computed_again() -> None:
    (engine,) = engines_of("a")
    await tokens_of(engine, request_of("one", 100, 1))
    began = now()
    (output,) = await collect(engine.start_generate(request_of("two", 100, 1)))
    assert output.usage == Usage(cached=96, computed=4)
    assert now() - began == pytest.approx(prefill(4))


@in_virtual_time
async def test_output_becomes_cache_for_the_next_turn() -> None:
    (engine,) = engines_of("a")
    first = request_of("one", 40, 30)
    answer = await tokens_of(engine, first)
    turn = Request(seq_id="two", prompt=(*first.prompt, *answer, 7), sampling_params={"max_tokens": 1})
    (output,) = await collect(engine.start_generate(turn))
    # 69 tokens have KV, the last token of the answer was never fed back.
    assert output.usage == Usage(cached=64, computed=7)


@in_virtual_time
async def test_without_prefix_caching_nothing_is_found() -> None:
    (engine,) = engines_of("a", prefix_caching=False)
    for name in ("one", "two"):
        (output,) = await collect(engine.start_generate(request_of(name, 100, 1)))
        assert output.usage == Usage(computed=100)


@in_virtual_time
async def test_output_from_elsewhere_counts() -> None:
    here, there = engines_of("here", "there")
    whole = await tokens_of(here, request_of("s", 50, 10))
    rest = await tokens_of(there, request_of("s", 50, 10), output=tuple(whole[:4]))
    assert rest == whole[4:]
    with pytest.raises(BadRequest, match="max_tokens: is 10, and must exceed"):
        await tokens_of(there, request_of("s", 50, 10), output=tuple(whole))


@in_virtual_time
async def test_when_blocks_run_out_the_newest_waits_and_all_finish() -> None:
    (engine,) = engines_of("a", profile=profile_of(blocks=12))
    requests = [request_of(f"s{index}", 32, 60, first=1000 * index) for index in range(3)]
    found = await asyncio.gather(*(tokens_of(engine, request) for request in requests))
    assert engine.counters.preemptions > 0
    alone = engines_of("b")[0]
    assert [await tokens_of(alone, request) for request in requests] == found
    assert is_empty(engine)


@in_virtual_time
async def test_what_never_fits_is_refused() -> None:
    (engine,) = engines_of("a", profile=profile_of(blocks=4))
    with pytest.raises(BadRequest, match="do not fit") as raised:
        await tokens_of(engine, request_of("s", 60, 10))
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("max_tokens", [0, -1, "many", 1.5])
@in_virtual_time
async def test_a_wrong_max_tokens_is_refused(max_tokens: object) -> None:
    (engine,) = engines_of("a")
    with pytest.raises(BadRequest, match="max_tokens"):
        await tokens_of(engine, Request(seq_id="s", prompt=(1, 2), sampling_params={"max_tokens": max_tokens}))


@in_virtual_time
async def test_one_sequence_generates_once_at_a_time() -> None:
    (engine,) = engines_of("a")
    task = asyncio.create_task(tokens_of(engine, request_of("s")))
    await asyncio.sleep(0.001)
    with pytest.raises(Conflict):
        await tokens_of(engine, request_of("s"))
    await task


# ---- prep_recv, remote_send ----------------------------------------------------------------------------------


@in_virtual_time
async def test_disaggregation_by_hand() -> None:
    sender, receiver = engines_of("p", "d", profile=profile_of(latency=0.002))
    request = request_of("s", 100, 5)
    async with receiver.prep_recv(request) as space:
        assert (space.matched_len, space.end, space.missing) == (0, 100, 100)
        sent = await sender.remote_send(request, space, 0, sample=True)
        last_layer = 100 * KV_BYTES / 4 / 1e9
        assert now() == pytest.approx(prefill(100) + last_layer + 0.002)
        assert (sent.bytes, sent.usage) == (100 * KV_BYTES, Usage(computed=100))
        assert sent.first is not None
        outputs = await collect(receiver.start_generate(request, sent.end, sent.first.token_ids))
    assert outputs[0].usage == Usage(received=100, computed=1)
    assert sum(len(output.token_ids) for output in outputs) == 4
    assert is_empty(sender)
    assert is_empty(receiver)


@in_virtual_time
async def test_a_step_that_sends_takes_longer_by_its_tokens() -> None:
    sender, receiver = engines_of("p", "d", profile=profile_of(latency=0.002), send_time=0.0001, stream_every=1)
    plain = asyncio.create_task(_times(sender, request_of("other", 50, 2, first=500)))
    request = request_of("s", 100)
    async with receiver.prep_recv(request) as space:
        await sender.remote_send(request, space, 0)
    # One step computes both prompts; only the hundred tokens that are sent make it longer.
    step = prefill(150) + 100 * 0.0001
    assert now() == pytest.approx(step + 100 * KV_BYTES / 4 / 1e9 + 0.002)
    assert await plain == pytest.approx([step, step + 0.010])


@in_virtual_time
async def test_received_kv_is_ordinary_cache() -> None:
    sender, receiver = engines_of("p", "d")
    request = request_of("s", 100)
    async with receiver.prep_recv(request) as space:
        await sender.remote_send(request, space, 0)
    (output,) = await collect(receiver.start_generate(request_of("other", 100, 1)))
    assert output.usage == Usage(cached=96, computed=4)


@in_virtual_time
async def test_only_what_is_missing_is_reserved_and_sent() -> None:
    sender, receiver = engines_of("p", "d")
    await tokens_of(receiver, request_of("before", 48, 1))
    request = request_of("s", 100)
    async with receiver.prep_recv(request) as space:
        assert space.matched_len == 48
        sent = await sender.remote_send(request, space, 48)
    assert sent.bytes == 52 * KV_BYTES


@in_virtual_time
async def test_what_the_sender_has_is_pushed_without_a_step() -> None:
    sender, receiver = engines_of("p", "d")
    await tokens_of(sender, request_of("before", 97, 1))
    steps, began, request = sender.counters.steps, now(), request_of("s", 96)
    async with receiver.prep_recv(request) as space:
        sent = await sender.remote_send(request, space, 0)
    assert sender.counters.steps == steps
    assert sent.usage == Usage(cached=96)
    assert now() - began == pytest.approx(96 * KV_BYTES * 1.25 / 1e9, rel=0.3)


@pytest.mark.parametrize("end", [None, -1, 64, 50, 15])
@in_virtual_time
async def test_cached_only_computes_nothing_also_on_a_busy_engine(end: int | None) -> None:
    sender, receiver = engines_of("s", "r")
    await tokens_of(sender, request_of("before", 70, 1))
    busy = asyncio.create_task(tokens_of(sender, request_of("busy", 30, 50, first=500)))
    await asyncio.sleep(prefill(30) + 0.013)
    began, computed = now(), sender.counters.prefill_tokens
    request = request_of("x", 100, 4)
    async with receiver.prep_recv(request) as space:
        sent = await sender.remote_send(request, space, 0, end, cached_only=True)
        assert sent.end == min(64, (100 if end is None else end % 100) // 16 * 16)
        assert (sent.usage, sent.bytes) == (Usage(cached=sent.end), sent.end * KV_BYTES)
        assert now() - began < 0.010, "between two steps"
        tokens = await tokens_of(receiver, request, sent.end)
    assert tokens == await tokens_of(engines_of("alone")[0], request_of("y", 100, 4))
    assert sender.counters.prefill_tokens == computed
    assert receiver.counters.prefill_tokens == 100 - sent.end
    await busy
    assert is_empty(sender)
    assert is_empty(receiver)


def test_transfers_that_share_a_link_wait_for_each_other() -> None:
    async def main() -> list[float]:
        sender, *receivers = engines_of("p", "d1", "d2", profile=profile_of(speed=1e6))
        await tokens_of(sender, request_of("before", 97, 1))
        began, request = now(), request_of("s", 96)

        async def send(index: int) -> float:
            async with receivers[index].prep_recv(request) as space:
                await sender.remote_send(request, space, 0)
            return now() - began

        return list(await asyncio.gather(send(0), send(1)))

    one, two = run_virtual(main())
    alone = 96 * KV_BYTES / 1e6
    assert one == pytest.approx(alone, rel=0.3)
    assert two == pytest.approx(one + alone, rel=0.1)


@in_virtual_time
async def test_a_gap_is_computed_whatever_the_caller_says() -> None:
    sender, receiver = engines_of("p", "d")
    request = request_of("s", 100, 1)
    async with receiver.prep_recv(request) as space:
        await sender.remote_send(request, space, 48)
        (output,) = await collect(receiver.start_generate(request, 100))
    assert output.usage == Usage(computed=100)


@in_virtual_time
async def test_a_reservation_waits_for_the_step_under_way_and_no_longer() -> None:
    (engine,) = engines_of("a")
    task = asyncio.create_task(tokens_of(engine, request_of("busy", 100, 50)))
    await asyncio.sleep(prefill(100) + 0.003)
    async with engine.prep_recv(request_of("s", 50, first=900)):
        assert now() == pytest.approx(prefill(100) + 0.010)
    await task


@in_virtual_time
async def test_leases_are_capped() -> None:
    (engine,) = engines_of("a", profile=profile_of(blocks=20), max_lease_share=0.5)
    async with engine.prep_recv(request_of("one", 100)):
        with pytest.raises(NoSpace):
            async with engine.prep_recv(request_of("two", 100, first=900)):
                pass
    assert is_empty(engine)


@in_virtual_time
async def test_a_lease_ends_by_itself_and_late_kv_is_refused() -> None:
    sender, receiver = engines_of("p", "d", lease_ttl=1.0)
    request = request_of("s", 100)
    async with receiver.prep_recv(request) as space:
        await asyncio.sleep(2)
        assert is_empty(receiver)
        with pytest.raises(TransferFailed):
            await sender.remote_send(request, space, 0)
    await asyncio.sleep(1)  # a step that runs is not interrupted
    assert is_empty(sender)


@in_virtual_time
async def test_kv_of_other_tokens_or_another_salt_is_refused() -> None:
    sender, receiver = engines_of("p", "d")
    mine = request_of("s", 64, 5)
    others = structs.replace(mine, prompt=(mine.prompt[0] + 1, *mine.prompt[1:]))
    async with receiver.prep_recv(mine) as space:
        for wrong in (others, structs.replace(mine, cache_salt="other")):
            with pytest.raises(TransferFailed, match="other tokens") as raised:
                await sender.remote_send(wrong, space, 0)
            assert raised.value.param == "kv_addr_info"
        assert await receiver.release(space.lease) == 0
    async with receiver.prep_recv(mine) as space:
        with pytest.raises(BadRequest, match="cache_salt"):
            await collect(receiver.start_generate(structs.replace(mine, cache_salt="other"), 0))
        assert (await sender.remote_send(structs.replace(mine, cache_salt=""), space, 0)).end == 64
    assert is_empty(receiver)


@in_virtual_time
async def test_chunks_that_had_arrived_of_a_sender_that_died_are_kept() -> None:
    sender, receiver = engines_of("p", "d", max_num_batched_tokens=64, max_num_seqs=8)
    request = request_of("s", 256, 5)
    async with receiver.prep_recv(request) as space:
        sending = asyncio.ensure_future(sender.remote_send(request, space, 0))
        await asyncio.sleep(3.5 * prefill(64))
        sender.fail()
        with pytest.raises(EngineUnreachable):
            await sending
    async with receiver.prep_recv(request) as space:
        assert space.matched_len in (128, 192)
    assert is_empty(receiver)


@in_virtual_time
async def test_what_a_sender_computes_keeps_a_lease_alive() -> None:
    sender, receiver = engines_of("p", "d", max_num_batched_tokens=64, max_num_seqs=8, lease_ttl=0.2)
    request = request_of("s", 512, 5)
    async with receiver.prep_recv(request) as space:
        assert (await sender.remote_send(request, space, 0)).end == 512
        assert now() > 0.5
        await asyncio.sleep(0.25)
        assert not receiver.busy, "no sign of life any more"


@in_virtual_time
async def test_a_lease_is_extended_to_more_of_its_sequence() -> None:
    sender, receiver = engines_of("p", "d", profile=profile_of(blocks=40), max_lease_share=0.5)
    whole = request_of("s", 192, 5)
    begun = structs.replace(whole, prompt=whole.prompt[:100])
    async with receiver.prep_recv(begun) as space:
        await sender.remote_send(begun, space, 0)
        more = await receiver.extend_recv(space, whole)
        assert (more.lease, more.end, more.kv_addr_info.begin) == (space.lease, 192, 0)
        assert 0 < more.matched_len <= 100
        too_long = structs.replace(whole, prompt=whole.prompt * 3)
        with pytest.raises(NoSpace):
            await receiver.extend_recv(more, too_long)
        for wrong in (begun, structs.replace(whole, prompt=(1, *whole.prompt[1:]))):
            with pytest.raises(BadRequest):
                await receiver.extend_recv(more, wrong)
        await sender.remote_send(whole, more, more.matched_len)
        outputs = [output async for output in receiver.start_generate(whole, 192)]
    assert outputs[0].usage == Usage(received=191, computed=1)
    with pytest.raises(UnknownSequence):
        await receiver.extend_recv(more, whole)
    assert is_empty(receiver)


@in_virtual_time
async def test_release_by_hand() -> None:
    sender, receiver = engines_of("p", "d")
    request = request_of("s", 100)
    async with receiver.prep_recv(request) as space:
        await sender.remote_send(request, space, 0, 64)
        assert await receiver.release(space.lease) == 64
        with pytest.raises(UnknownSequence):
            await receiver.release(space.lease)
    assert is_empty(receiver)


@in_virtual_time
async def test_layouts_must_agree() -> None:
    profile = profile_of()
    sender = engines_of("p", profile=profile)[0]
    other = structs.replace(profile.model, name="another")
    receiver = engines_of("d", profile=structs.replace(profile, model=other))[0]
    sender.network.add(receiver)
    request = request_of("s")
    async with receiver.prep_recv(request) as space:
        with pytest.raises(LayoutMismatch, match="another"):
            await sender.remote_send(request, space, 0)


@in_virtual_time
async def test_live_migration_moves_a_running_context() -> None:
    source, destination = engines_of("a", "b")
    request = request_of("s", 100, 200)
    whole = await tokens_of(engines_of("c")[0], request)
    began = now()
    stream = source.start_generate(request)
    first = await anext(stream)
    # Let it decode for a while, then move what it has: the prompt and 60 tokens of output.
    await asyncio.sleep(0.010 * 60 + 0.005)
    moved = Request(seq_id="move", prompt=(*request.prompt, *whole[:60]), sampling_params={"max_tokens": 1})
    async with destination.prep_recv(moved) as space:
        sent = await source.remote_send(moved, space, 0)
    assert (sent.usage.cached, sent.usage.computed) == (160, 0), "its own blocks, the partly filled one included"
    await stream.aclose()
    assert first.token_ids == (whole[0],)
    rest = await tokens_of(destination, request_of("s", 100, 200), output=tuple(whole[:60]))
    assert rest == whole[60:]
    assert now() > began
    assert is_empty(source)


# ---- the end of things ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_abort_ends_a_generation_and_a_send() -> None:
    sender, receiver = engines_of("p", "d")
    generating = asyncio.create_task(collect(sender.start_generate(request_of("g", 100, 1000))))
    async with receiver.prep_recv(request_of("s", 100)) as space:
        sending = asyncio.create_task(sender.remote_send(request_of("s", 100), space, 0))
        await asyncio.sleep(0.05)
        await sender.abort("g")
        await sender.abort("s")
        await sender.abort("nobody")
        with pytest.raises(UnknownSequence):
            await sending
        assert (await generating)[-1].finish_reason == "abort"
    await asyncio.sleep(1)
    assert is_empty(sender)
    assert is_empty(receiver)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.109, 0.115, 0.12, 0.3])
@in_virtual_time
async def test_cancelled_whenever_nothing_stays_taken(after: float) -> None:
    sender, receiver = engines_of("p", "d", profile=profile_of(latency=0.002))
    noise = asyncio.create_task(tokens_of(receiver, request_of("noise", 10, 60)))

    async def serve() -> None:
        request = request_of("s", 100, 50)
        async with receiver.prep_recv(request) as space:
            sent = await sender.remote_send(request, space, 0, sample=True)
            assert sent.first is not None
            await collect(receiver.start_generate(request, sent.end, sent.first.token_ids))

    task = asyncio.create_task(serve())
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.wait({task})
    await noise
    await asyncio.sleep(1)
    assert is_empty(sender)
    assert is_empty(receiver)


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("after", [0.0, 0.05, 0.109, 0.115, 0.2])
@in_virtual_time
async def test_killed_whenever_callers_learn_of_it_and_the_other_is_clean(victim: str, after: float) -> None:
    sender, receiver = engines_of("p", "d", profile=profile_of(latency=0.002))
    dead, alive = (sender, receiver) if victim == "p" else (receiver, sender)
    failures: list[type[Exception]] = []

    async def serve() -> None:
        request = request_of("s", 100, 50)
        try:
            async with receiver.prep_recv(request) as space:
                sent = await sender.remote_send(request, space, 0, sample=True)
                assert sent.first is not None
                await collect(receiver.start_generate(request, sent.end, sent.first.token_ids))
        except (EngineUnreachable, TransferFailed) as error:
            failures.append(type(error))

    task = asyncio.create_task(serve())
    await asyncio.sleep(after)
    dead.fail()
    await asyncio.wait_for(task, 100)
    assert failures or (victim == "p" and after >= 0.115)
    await asyncio.sleep(prefill(100))  # a sender that learns of it at the beginning of a step ends the step first
    assert is_empty(alive)
    with pytest.raises(EngineUnreachable):
        await dead.status()
    dead.recover()
    assert await tokens_of(dead, request_of("again", 10, 2))
    assert is_empty(dead)


def test_lost_transfers_follow_the_seed() -> None:
    async def main() -> list[bool]:
        sender, receiver = engines_of("p", "d", transfer_failures=0.5)
        lost: list[bool] = []
        for index in range(20):
            request = request_of(f"s{index}", 20, first=index * 100)
            async with receiver.prep_recv(request) as space:
                try:
                    await sender.remote_send(request, space, 0)
                except TransferFailed:
                    lost.append(True)
                else:
                    lost.append(False)
        assert is_empty(sender)
        assert is_empty(receiver)
        return lost

    lost = run_virtual(main())
    assert 3 < sum(lost) < 17
    assert run_virtual(main()) == lost


@in_virtual_time
async def test_status_within_a_run_of_steps() -> None:
    (engine,) = engines_of("a")
    task = asyncio.create_task(tokens_of(engine, request_of("s", 32, 100)))
    await asyncio.sleep(prefill(32) + 0.010 * 40 + 0.005)
    status = await engine.status()
    # 32 prompt tokens and the 41 that are decoded by the end of this step.
    assert status.total_blocks - status.free_blocks == -(-(32 + 41) // 16)
    assert (status.running, status.waiting, status.block_size) == (1, 0, 16)
    await task


# A core that stands still: nothing of it goes on, nothing is lost, and all goes on where it stopped.

# A prompt of 100 tokens takes 109 ms, each further token 10 ms.
DURING = {"idle": 0.0, "prefill": 0.05, "decode": 0.2}


@pytest.mark.parametrize("moment", DURING.values(), ids=DURING)
@pytest.mark.parametrize("every", [0, 1])
@in_virtual_time
async def test_everything_is_later_by_as_long_as_it_stood_still(moment: float, every: int) -> None:
    async def ends(frozen: float) -> tuple[float, list[int]]:
        (engine,) = engines_of("e", stream_every=every)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not moment:
            engine.freeze()
        asking = asyncio.ensure_future(tokens_of(engine, request_of("s", max_tokens=30)))
        await asyncio.sleep(moment)
        engine.freeze()
        await asyncio.sleep(frozen)
        assert not asking.done()
        engine.thaw()
        tokens = await asking
        ended = loop.time()
        await asyncio.sleep(1)
        assert is_empty(engine)
        return ended - began, tokens

    calm, expected = await ends(0.0)
    late, found = await ends(7.0)
    assert found == expected
    assert late - calm == pytest.approx(7.0)


@in_virtual_time
async def test_a_frozen_core_answers_nothing_and_takes_in_what_was_asked_later() -> None:
    (engine,) = engines_of("e", stream_every=0)
    running = asyncio.ensure_future(tokens_of(engine, request_of("first", max_tokens=50)))
    await asyncio.sleep(0.2)
    engine.freeze()
    asked = [asyncio.ensure_future(collect(engine.start_generate(request_of("second", first=500))))]
    status = asyncio.ensure_future(engine.status())
    await asyncio.sleep(60)
    assert engine.load().stalled_s == pytest.approx(60)
    assert not any(task.done() for task in (running, status, *asked))
    engine.thaw()
    assert (await status).running >= 1
    assert engine.load().stalled_s == 0
    done, _ = await asyncio.wait([running, *asked], return_when=asyncio.FIRST_COMPLETED)
    assert done == set(asked)  # it need not wait for the end of the run of steps that the freeze was in
    await running
    await asyncio.sleep(1)
    assert is_empty(engine)


@in_virtual_time
async def test_a_frozen_core_can_be_killed() -> None:
    (engine,) = engines_of("e")
    asking = asyncio.ensure_future(tokens_of(engine, request_of("s", max_tokens=50)))
    await asyncio.sleep(0.2)
    engine.freeze()
    engine.fail()
    with pytest.raises(EngineUnreachable):
        await asking
    engine.recover()
    assert len(await tokens_of(engine, request_of("t", max_tokens=3))) == 3
