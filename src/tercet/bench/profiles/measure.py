"""Measuring a running engine's step times through the verbs: prefills, decodes, and transfers to a second engine.

Every step is measured alone: one prompt on an idle engine, or a batch of decodes while no prompt is computed. A prefill
takes from its call to its first token, less what a call costs by itself. A decode step is the mean gap between tokens
while the whole batch decodes. What a profile says beyond the largest step measured is extrapolated.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import count

import msgspec
import numpy as np

from tercet.protocol import BadRequest, Engine, EngineError, EngineStatus, KVLayout, Output, Request
from tercet.sim.fit import DecodePoint, PrefillPoint, fit_steps
from tercet.sim.profile import ModelShape, Profile, Provenance, Transfer

BYTES_OF = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "uint8": 1}
# Token ids that every vocabulary has, and that mean nothing special in most.
FIRST_ID, LAST_ID = 1000, 20_000
DECODE_STEPS = 24


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, each ``repeats`` times.

    ``max_step_tokens`` is the engine's ``--max-num-batched-tokens``: longer prompts would take several steps.
    """

    name: str
    device: str
    max_step_tokens: int = 512
    prefills: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    cached: tuple[int, ...] = (0, 512, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (128, 512, 1024)
    sends: tuple[int, ...] = (256, 512, 1024)
    repeats: int = 3
    seed: int = 0

    def check(self) -> Plan:
        """Itself; raises :class:`~tercet.protocol.BadRequest` naming what makes no sense."""
        if self.max_step_tokens < 128:
            raise BadRequest(f"max_step_tokens: is {self.max_step_tokens}, and must be 128 at least", "max_step_tokens")
        if self.repeats < 1:
            raise BadRequest(f"repeats: is {self.repeats}, and must be 1 at least", "repeats")
        return self


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; times in seconds."""

    status: EngineStatus
    layout: KVLayout
    call: float
    prefills: tuple[PrefillPoint, ...]
    decodes: tuple[DecodePoint, ...]
    transfer: Transfer | None


class Meter:
    """Measures one engine, and transfers from it to ``receiver`` if there is one; ``note`` is told what comes next."""

    def __init__(self, engine: Engine, receiver: Engine | None, plan: Plan, note: Callable[[str], None]) -> None:
        self._engine = engine
        self._receiver = receiver
        self._plan = plan.check()
        self._note = note
        self._random = random.Random(plan.seed)
        self._names = (f"profile-{self._random.getrandbits(64):x}-{index}" for index in count())
        self._clock = asyncio.get_running_loop().time

    async def measure(self) -> Measured:
        """Measure everything; raises :class:`~tercet.protocol.BadRequest` when others use the engine."""
        status = await self._idle(self._engine)
        if self._receiver is not None:
            await self._idle(self._receiver)
        self._note("warming up")
        await self._ttft(self._fresh(64))
        await self._together([self._fresh(16)], DECODE_STEPS)
        layout, call = await self._call()
        longest = min(status.max_model_len, status.total_blocks * status.block_size // 2)
        prefills = await self._prefills(layout.block_size, longest, call)
        room = int(status.total_blocks * status.block_size * 0.8)
        decodes = await self._decodes(longest, room)
        transfer = await self._transfer(self._receiver, longest) if self._receiver is not None else None
        return Measured(status=status, layout=layout, call=call, prefills=prefills, decodes=decodes, transfer=transfer)

    # ---- the parts -------------------------------------------------------------------------------------------

    async def _idle(self, engine: Engine) -> EngineStatus:
        status = await engine.status()
        if status.running or status.waiting:
            raise BadRequest(f"engine: {engine.name} is serving others; measure an idle one", "engine")
        return status

    async def _call(self) -> tuple[KVLayout, float]:
        """The KV layout, and the seconds of a call that computes nothing."""
        self._note("calls")
        found = [await self._reserve() for _ in range(max(5, self._plan.repeats))]
        return found[0][0], statistics.median(seconds for _, seconds in found)

    async def _reserve(self) -> tuple[KVLayout, float]:
        began = self._clock()
        async with self._engine.prep_recv(self._request(self._fresh(64), 1)) as reservation:
            return reservation.kv_addr_info.layout, self._clock() - began

    async def _prefills(self, block_size: int, longest: int, call: float) -> tuple[PrefillPoint, ...]:
        sizes = [size for size in self._plan.prefills if size <= self._plan.max_step_tokens]
        points = list[PrefillPoint]()
        for cached in sorted({size // block_size * block_size for size in self._plan.cached}):
            if cached + sizes[0] >= longest:
                continue
            prefix = self._fresh(cached)
            if prefix:
                await self._ttft(prefix)
            for size in sizes:
                if cached + size < longest:
                    self._note(f"prefill of {size} tokens behind {cached}")
                    points.append(await self._prefill(prefix, size, call))
        return tuple(points)

    async def _prefill(self, prefix: tuple[int, ...], size: int, call: float) -> PrefillPoint:
        found = [await self._ttft(prefix + self._fresh(size)) for _ in range(self._plan.repeats)]
        usages = [output.usage for _, output in found]
        seconds = statistics.median(ttft for ttft, _ in found) - call
        tokens = statistics.median(usage.computed if usage is not None else size for usage in usages)
        return PrefillPoint(int(tokens), len(prefix) + size - int(tokens), max(seconds, 1e-6))

    async def _decodes(self, longest: int, room: int) -> tuple[DecodePoint, ...]:
        points = list[DecodePoint]()
        for context in self._plan.contexts:
            for batch in self._plan.batches:
                tokens = context + DECODE_STEPS + 2 * batch
                if tokens < longest and tokens * batch <= room:
                    self._note(f"decode of {batch} sequences at {context} tokens")
                    points.append(await self._decode(batch, context))
        return tuple(points)

    async def _decode(self, batch: int, context: int) -> DecodePoint:
        found = list[tuple[float, float]]()
        for _ in range(self._plan.repeats):
            prompts = [self._fresh(context) for _ in range(batch)]
            for prompt in prompts:
                await self._ttft(prompt)  # from now on it is cached, so that all of them begin at once
            # While the first of a batch decode already, the last ones begin: at most a step for each.
            found.append(await self._together(prompts, DECODE_STEPS + 2 * batch))
        seconds = statistics.median(each for each, _ in found)
        return DecodePoint(batch, context + round(statistics.mean(done for _, done in found)), seconds)

    async def _together(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
        """Seconds of a step while all of them decode, and the tokens that they have in the middle of that time."""
        times = await asyncio.gather(*(self._token_times(prompt, tokens) for prompt in prompts))
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        gaps, positions = list[float](), list[float]()
        for each in times:
            inside = [index for index, at in enumerate(each) if begin <= at <= end]
            if len(inside) > 1:
                gaps.append((each[inside[-1]] - each[inside[0]]) / (inside[-1] - inside[0]))
                positions.append((inside[0] + inside[-1]) / 2)
        if not gaps:
            raise EngineError(f"{len(prompts)} sequences were never decoded together; is max-num-seqs that low?")
        return statistics.mean(gaps), statistics.mean(positions)

    async def _transfer(self, receiver: Engine, longest: int) -> Transfer:
        """A line through the times of sends of several sizes, of KV that is there already."""
        sizes, seconds = list[int](), list[float]()
        for tokens in self._plan.sends:
            if tokens >= longest:
                continue
            self._note(f"transfer of {tokens} tokens")
            for _ in range(self._plan.repeats):
                prompt = self._fresh(tokens)
                await self._ttft(prompt)
                request = self._request(prompt, 1)
                async with receiver.prep_recv(request) as reservation:
                    sent = await self._engine.remote_send(request, reservation, reservation.matched_len)
                sizes.append(sent.bytes)
                seconds.append(sent.seconds)
        slope, latency = np.polyfit(sizes, seconds, 1) if len(set(sizes)) > 1 else (0.0, 0.0)
        if slope <= 0:
            raise EngineError("more KV took no longer than less: the machine is too busy to measure transfers")
        return Transfer(bytes_per_second=float(1 / slope), latency=max(0.0, float(latency)))

    # ---- one request -----------------------------------------------------------------------------------------

    def _fresh(self, tokens: int) -> tuple[int, ...]:
        """A prompt that no cache knows."""
        return tuple(self._random.choices(range(FIRST_ID, LAST_ID), k=tokens))

    def _request(self, prompt: tuple[int, ...], tokens: int) -> Request:
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return Request(seq_id=next(self._names), prompt=prompt, sampling_params=sampling)

    async def _ttft(self, prompt: tuple[int, ...]) -> tuple[float, Output]:
        began = self._clock()
        async with aclosing(self._engine.start_generate(self._request(prompt, 1))) as outputs:
            first = await anext(outputs)
            return self._clock() - began, first

    async def _token_times(self, prompt: tuple[int, ...], tokens: int) -> list[float]:
        times = list[float]()
        async with aclosing(self._engine.start_generate(self._request(prompt, tokens))) as outputs:
            async for output in outputs:
                times += [self._clock()] * len(output.token_ids)
        return times


def profile_from(measured: Measured, plan: Plan, command: str, transfer: Transfer) -> Profile:
    """The profile that fits; ``transfer`` is assumed where none was measured. The note says so."""
    status, layout = measured.status, measured.layout
    largest = max(point.tokens for point in measured.prefills)
    knots = [knot for knot in (1, 4, 16, 64, 256) if knot < largest] + [largest]
    steps, errors = fit_steps(measured.prefills, measured.decodes, knots)
    assumed = "" if measured.transfer else " Not measured: transfer."
    return Profile(
        name=plan.name,
        model=ModelShape(
            name=status.model,
            layers=layout.num_layers,
            kv_heads=layout.num_kv_heads,
            head_size=layout.head_size,
            kv_dtype=layout.dtype,
            kv_dtype_bytes=_bytes_of(layout.dtype),
        ),
        device=plan.device,
        tp_size=layout.tp_size,
        block_size=status.block_size,
        total_blocks=status.total_blocks,
        max_model_len=status.max_model_len,
        steps=steps,
        transfer=measured.transfer or transfer,
        provenance=Provenance(
            source=f"measured on {status.engine}, vLLM {status.vllm_version}, Tercet {status.version}",
            date=datetime.now(UTC).date().isoformat(),
            command=command,
            fit_error=errors,
            note=(
                f"{len(measured.prefills)} prefill and {len(measured.decodes)} decode steps, median of {plan.repeats}. "
                f"Steps are at most {plan.max_step_tokens} tokens there: simulate with "
                f"--option max_num_batched_tokens={plan.max_step_tokens}.{assumed}"
            ),
        ),
        call=measured.call,
    )


def _bytes_of(dtype: str) -> int:
    name = dtype.removeprefix("torch.")
    if name not in BYTES_OF:
        raise EngineError(f"the engine's KV is of type {dtype}, whose size is not known here")
    return BYTES_OF[name]
