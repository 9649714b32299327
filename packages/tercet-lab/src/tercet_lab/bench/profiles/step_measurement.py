"""The measurement of a running engine's step times through the verbs: prefills, decodes, effects of a second engine.

Every step is measured alone: one prompt on an idle engine, or a batch of decodes while no prompt is computed. The time
of a prefill is the time from the call to the first token, minus the time of a call. The time of a decode step is the
mean gap between tokens while the whole batch decodes. A profile extrapolates beyond the largest measured step. A second
engine receives transfers. If it shares the first engine's host, both compute at the same time in one measurement.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
import numpy as np

from tercet.protocol import BadRequest, Engine, EngineError, EngineStatus, KVLayout, Sent
from tercet_lab.bench.profiles.engine_probe import Probe, measure_router, measure_sharing, names_from
from tercet_lab.sim.fit import DecodePoint, PrefillPoint, fit_steps
from tercet_lab.sim.step_times import HostSharing, ModelShape, Profile, Provenance, Transfer

BYTES_OF = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "uint8": 1}
DECODE_STEPS = 24
ROUTER_REQUESTS = 8


class MeasurementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a measurement. Each point is measured ``repeats`` times; sizes are in tokens.

    ``max_step_tokens`` is the engine's ``--max-num-batched-tokens``: longer prompts would take several steps. With
    ``same_host``, the second engine is on the first one's machine, and their effects on each other are measured.
    ``router`` is the URL of a router of both engines (None: not measured).
    """

    name: str
    device: str
    max_step_tokens: int = 512
    prefills: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    cached: tuple[int, ...] = (0, 512, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (128, 512, 1024)
    sends: tuple[int, ...] = (256, 512, 1024)
    same_host: bool = False
    router: str | None = None
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        if self.max_step_tokens < 128:
            raise BadRequest(f"max_step_tokens: is {self.max_step_tokens}, and must be at least 128", "max_step_tokens")
        if self.repeats < 1:
            raise BadRequest(f"repeats: is {self.repeats}, and must be at least 1", "repeats")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a measurement. Times are in seconds; None: not measured."""

    status: EngineStatus
    layout: KVLayout
    call: float
    prefills: tuple[PrefillPoint, ...]
    decodes: tuple[DecodePoint, ...]
    transfer: Transfer | None
    router: float
    sharing: HostSharing | None


class Meter:
    """The measurement of one engine, and of the effects of ``other`` (None: no second engine).

    ``note`` gets a line of progress before each step, such as ``12 of 40: decode of 4 sequences ...``.
    """

    def __init__(
        self, engine: Engine, other: Engine | None, plan: MeasurementPlan, note: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._tell = note
        self._begun = self._steps = 0
        chance = random.Random(plan.seed)
        names = names_from(chance)
        self._engine = Probe(engine, chance, names)
        self._other = None if other is None else Probe(other, chance, names)
        self._clock = asyncio.get_running_loop().time

    async def measure(self) -> Measured:
        """Measure all parts of the plan. Raise :class:`~tercet.protocol.BadRequest` if an engine is not idle."""
        status = await self._idle(self._engine)
        if self._other is not None:
            await self._idle(self._other)
        self._tell("warming up")
        for probe in (self._engine, self._other) if self._other is not None else (self._engine,):
            await probe.ttft(probe.fresh(64))
            await probe.decode(1, 16, DECODE_STEPS)
        layout, call = await self._call()
        longest = min(status.max_model_len, status.total_blocks * status.block_size // 2)
        room = int(status.total_blocks * status.block_size * 0.8)
        prefixed, batched = self._prefill_sizes(layout.block_size, longest), self._decode_sizes(longest, room)
        rounds = 2 * self._plan.repeats + 1
        self._steps = len(prefixed) + len(batched) + (self._plan.router is not None)
        if self._other is not None:
            self._steps += rounds * len(self._send_sizes(longest)) + self._plan.same_host
        router = await self._router(self._plan.router) if self._plan.router is not None else 0.0
        transfer = await self._transfer(self._other, longest) if self._other is not None else None
        sharing = await self._sharing(self._other) if self._other is not None and self._plan.same_host else None
        prefills = await self._prefills(prefixed, call)
        decodes = await self._decodes(batched)
        return Measured(
            status=status,
            layout=layout,
            call=call,
            prefills=prefills,
            decodes=decodes,
            transfer=transfer,
            router=router,
            sharing=sharing,
        )

    def _begin(self, what: str) -> None:
        self._begun += 1
        self._note(what)

    def _note(self, what: str) -> None:
        self._tell(f"{self._begun} of {self._steps}: {what}")

    # ---- the parts of a measurement --------------------------------------------------------------------------

    async def _idle(self, probe: Probe) -> EngineStatus:
        status = await probe.engine.status()
        if status.running or status.waiting:
            raise BadRequest(f"engine: {probe.engine.name} is serving requests; measure an idle engine", "engine")
        return status

    async def _call(self) -> tuple[KVLayout, float]:
        """Return the KV layout, and the seconds of a call that computes nothing."""
        self._tell("calls")
        found = [await self._reserve() for _ in range(max(5, self._plan.repeats))]
        return found[0][0], statistics.median(seconds for _, seconds in found)

    async def _reserve(self) -> tuple[KVLayout, float]:
        began = self._clock()
        probe = self._engine
        async with probe.engine.prep_recv(probe.request(probe.fresh(64), 1)) as reservation:
            return reservation.kv_addr_info.layout, self._clock() - began

    def _prefill_sizes(self, block_size: int, longest: int) -> list[tuple[int, int]]:
        """Return pairs: a number of cached tokens, in whole blocks, and a number of computed tokens after them."""
        sizes = [size for size in self._plan.prefills if size <= self._plan.max_step_tokens]
        cached = sorted({size // block_size * block_size for size in self._plan.cached})
        return [(behind, size) for behind in cached for size in sizes if behind + size < longest]

    async def _prefills(self, sizes: Sequence[tuple[int, int]], call: float) -> tuple[PrefillPoint, ...]:
        points, prefix = list[PrefillPoint](), tuple[int, ...]()
        for cached, size in sizes:
            if cached != len(prefix):
                prefix = self._engine.fresh(cached)
                await self._engine.ttft(prefix)
            self._begin(f"prefill of {size} tokens after {cached} cached ones")
            points.append(await self._prefill(prefix, size, call))
        return tuple(points)

    async def _prefill(self, prefix: tuple[int, ...], size: int, call: float) -> PrefillPoint:
        found = [await self._engine.ttft(prefix + self._engine.fresh(size)) for _ in range(self._plan.repeats)]
        usages = [output.usage for _, output in found]
        seconds = statistics.median(ttft for ttft, _ in found) - call
        tokens = statistics.median(usage.computed if usage is not None else size for usage in usages)
        return PrefillPoint(int(tokens), len(prefix) + size - int(tokens), max(seconds, 1e-6))

    def _decode_sizes(self, longest: int, room: int) -> list[tuple[int, int]]:
        """Return pairs of a batch size and a number of context tokens that fit into the KV cache."""
        found = list[tuple[int, int]]()
        for context in self._plan.contexts:
            for batch in self._plan.batches:
                tokens = context + DECODE_STEPS + 2 * batch
                if tokens < longest and tokens * batch <= room:
                    found.append((batch, context))
        return found

    async def _decodes(self, sizes: Sequence[tuple[int, int]]) -> tuple[DecodePoint, ...]:
        points = list[DecodePoint]()
        for batch, context in sizes:
            self._begin(f"decode of {batch} sequences with {context} tokens each")
            points.append(await self._decode(batch, context))
        return tuple(points)

    async def _decode(self, batch: int, context: int) -> DecodePoint:
        found = [await self._engine.decode(batch, context, DECODE_STEPS) for _ in range(self._plan.repeats)]
        seconds = statistics.median(each for each, _ in found)
        return DecodePoint(batch, context + round(statistics.mean(done for _, done in found)), seconds)

    def _send_sizes(self, longest: int) -> list[int]:
        return [tokens for tokens in self._plan.sends if tokens < longest]

    async def _transfer(self, other: Probe, longest: int) -> Transfer:
        """Measure sends of cached KV of several sizes, and fit a line to their median times."""
        sizes = self._send_sizes(longest)
        sent = dict[int, list[Sent]]()
        for number in range(2 * self._plan.repeats + 1):
            for tokens in sizes:
                self._begin(f"transfer of {tokens} tokens, round {number + 1}")
                sent.setdefault(tokens, []).append(await self._send(other, tokens))
        return transfer_from(list(sent.values()))

    async def _send(self, other: Probe, tokens: int) -> Sent:
        prompt = self._engine.fresh(tokens)
        await self._engine.ttft(prompt)
        request = self._engine.request(prompt, 1)
        async with other.engine.prep_recv(request) as reservation:
            return await self._engine.engine.remote_send(request, reservation, reservation.matched_len)

    async def _router(self, url: str) -> float:
        self._begun += 1
        return await measure_router(url, self._engine, ROUTER_REQUESTS * self._plan.repeats, self._note)

    async def _sharing(self, other: Probe) -> HostSharing:
        """Measure the effects of the engines on each other.

        It takes twice the rounds of other points, since a ratio has the noise of two measurements.
        """
        tokens = self._plan.max_step_tokens // 2
        self._begun += 1
        return await measure_sharing(self._engine, other, tokens, 2 * self._plan.repeats, self._note)


def transfer_from(sent: Sequence[Sequence[Sent]]) -> Transfer:
    """Return the fit to sends of several sizes, one list per size.

    Raise ``EngineError`` if more KV did not take longer.
    """
    sizes = [statistics.median(each.bytes for each in same) for same in sent]
    seconds = [statistics.median(each.seconds for each in same) for same in sent]
    slope, latency = np.polyfit(sizes, seconds, 1) if len(set(sizes)) > 1 else (0.0, 0.0)
    if slope <= 0:
        raise EngineError(
            "a larger transfer took no longer than a smaller one: measure transfers on a less busy machine"
        )
    return Transfer(bytes_per_second=float(1 / slope), latency=max(0.0, float(latency)))


def profile_from(measured: Measured, plan: MeasurementPlan, command: str, transfer: Transfer) -> Profile:
    """Return the fitted profile. It has ``transfer`` if transfers were not measured, and its note then says so."""
    status, layout = measured.status, measured.layout
    largest = max(point.tokens for point in measured.prefills)
    knots = [knot for knot in (1, 4, 16, 64, 256) if knot < largest] + [largest]
    steps, errors = fit_steps(measured.prefills, measured.decodes, knots)
    parts = {
        "transfer": measured.transfer,
        "router": plan.router,
        "sharing a host": measured.sharing,
    }
    missing = ", ".join(name for name, found in parts.items() if found is None)
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
                f"Its steps have at most {plan.max_step_tokens} tokens: simulate with "
                f"--option max_num_batched_tokens={plan.max_step_tokens}."
                + (f" Not measured: {missing}." if missing else "")
            ),
        ),
        call=measured.call,
        router=measured.router,
        sharing=measured.sharing,
    )


def _bytes_of(dtype: str) -> int:
    name = dtype.removeprefix("torch.")
    if name not in BYTES_OF:
        raise EngineError(f"the engine's KV has type {dtype}, whose size is unknown; use one of {', '.join(BYTES_OF)}")
    return BYTES_OF[name]
