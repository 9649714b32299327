"""The measurement of a running engine's step times through the verbs: prefills, decodes, effects of a second engine.

Every step is measured alone: one prompt on an idle engine, or a batch of decodes while no prompt is computed. The time
of a prefill is the time from the call to the first token, minus the time of a call. The time of a decode step is the
mean gap between tokens while the whole batch decodes. A profile extrapolates beyond the largest measured step.

A second engine receives transfers. If it shares the first engine's host, one engine is measured while the other one
sleeps, computes or lingers. An engine lingers when it has no more work and its processes still poll without a pause,
which keeps their cores busy.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from itertools import count, pairwise
from typing import Literal

import aiohttp
import msgspec
import numpy as np

from tercet.protocol import BadRequest, Engine, EngineError, EngineStatus, KVLayout, Output, Request, Sent
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import reason_of
from tercet_bench.openai_client import COMPLETIONS, Client, PreparedCall, body_of
from tercet_lab.bench.workloads.conversations import refuse
from tercet_lab.sim.step_times import (
    DecodePoint,
    HostSharing,
    ModelShape,
    PrefillPoint,
    Profile,
    Provenance,
    Transfer,
    fit_steps,
)

# Token ids that every vocabulary has; in most vocabularies they are not special.
FIRST_ID, LAST_ID = 1000, 20_000
TOKENS = 16
TIMEOUT_SECONDS = 60.0


def names_from(chance: random.Random) -> Iterator[str]:
    """Return an endless iterator of unique sequence ids."""
    return (f"profile-{chance.getrandbits(64):x}-{index}" for index in count())


class Probe:
    """A client that sends requests to one engine and measures their times, in seconds."""

    def __init__(self, engine: Engine, chance: random.Random, names: Iterator[str]) -> None:
        self.engine = engine
        self._random = chance
        self._names = names
        self._clock = asyncio.get_running_loop().time

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """Return a random prompt that no cache has."""
        return tuple(self._random.choices(range(FIRST_ID, LAST_ID), k=tokens))

    def request(self, prompt: tuple[int, ...], tokens: int) -> Request:
        """Return a request for exactly ``tokens`` output tokens."""
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return Request(seq_id=next(self._names), prompt=prompt, sampling_params=sampling)

    async def ttft(self, prompt: tuple[int, ...]) -> tuple[float, Output]:
        """Send a request for one token. Return the seconds until it arrived, and its output."""
        began = self._clock()
        async with aclosing(self.engine.start_generate(self.request(prompt, 1))) as outputs:
            first = await anext(outputs)
            return self._clock() - began, first

    async def token_times(self, prompt: tuple[int, ...], tokens: int) -> list[float]:
        """Generate ``tokens`` output tokens. Return the time of each, in seconds of the loop's clock."""
        times = list[float]()
        async with aclosing(self.engine.start_generate(self.request(prompt, tokens))) as outputs:
            async for output in outputs:
                times += [self._clock()] * len(output.token_ids)
        return times

    async def decode(self, batch: int, context: int, steps: int) -> tuple[float, float]:
        """Measure decode steps of ``batch`` sequences, as :meth:`together` does.

        Each prompt has ``context`` tokens; at least ``steps`` steps decode the whole batch.
        """
        prompts = [self.fresh(context) for _ in range(batch)]
        for prompt in prompts:
            await self.ttft(prompt)  # from now on it is cached, so that all sequences begin at the same time
        # The last sequences of a batch begin while the first ones decode already: at most one step for each.
        return await self.together(prompts, steps + 2 * batch)

    async def together(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
        """Generate for all prompts at the same time.

        Return the mean seconds of a step while all of them decode, and the mean number of output tokens in the middle
        of that time. Raise ``EngineError`` if they never decoded at the same time.
        """
        times = await asyncio.gather(*(self.token_times(prompt, tokens) for prompt in prompts))
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        gaps, positions = list[float](), list[float]()
        for each in times:
            inside = [index for index, at in enumerate(each) if begin <= at <= end]
            if len(inside) > 1:
                gaps.append((each[inside[-1]] - each[inside[0]]) / (inside[-1] - inside[0]))
                positions.append((inside[0] + inside[-1]) / 2)
        if not gaps:
            raise EngineError(
                f"{len(prompts)} sequences did not decode at the same time; raise the engine's max-num-seqs"
            )
        return statistics.mean(gaps), statistics.mean(positions)


async def measure_router(url: str, engine: Probe, rounds: int, note: Callable[[str], None]) -> float:
    """Return the seconds that the router at ``url`` adds to the time to first token.

    Requests of a few tokens go through the router and directly to the engine, in turn; the result is the difference of
    the medians. Raise :class:`~tercet.protocol.BadRequest` if no router answers, ``EngineError`` if a request fails.
    """
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models") as response:
            model: str = msgspec.json.decode(await response.read())["data"][0]["id"]
    except (aiohttp.ClientError, LookupError, TypeError, *UNREADABLE) as error:
        raise BadRequest(f"--router: no router answers at {url}: {reason_of(error)}", "--router") from error
    added = list[tuple[float, float]]()
    async with Client(time.perf_counter(), TIMEOUT_SECONDS) as client:
        for number in range(rounds + 1):
            note(f"router, {number + 1} of {rounds + 1}")
            seconds = (await engine.ttft(engine.fresh(TOKENS)))[0]
            # One engine serves it, as for the direct request.
            body, headers = body_of(model, engine.fresh(TOKENS), 1), {PROGRAM_HEADER: "data_parallel"}
            record, _ = await client.send(PreparedCall(0, url + COMPLETIONS, body, headers), client.now())
            if record.failure is not None or record.first_token is None:
                raise EngineError(f"the router at {url} failed: {record.error or record.failure}")
            added.append((seconds, record.first_token - record.sent))
    # The first round opens connections.
    direct, through = (statistics.median(each) for each in zip(*added[1:], strict=True))
    return max(0.0, through - direct)


Seconds = tuple[float, float]
"""Mean seconds of a prefill and of a decode step."""
Neighbour = Literal["sleep", "prefill", "decode", "linger"]
NEIGHBOURS: tuple[Neighbour, ...] = ("sleep", "prefill", "decode", "linger")
# The measured steps, and the number of output tokens of the other engine's requests.
PREFILLS, BATCH, CONTEXT, STEPS = 4, 2, 128, 48
DECODE_TOKENS = 512
SETTLE_SECONDS = 1.0
# Pause before each prefill, as between requests: the CPU caches of an engine are cold when another one computed.
SLEEP_SECONDS = 1.0
# A lingering neighbour gets a prompt of this length at this interval; its linger time is at most LINGER_SECONDS.
POKE_TOKENS, POKE_SECONDS = 16, 0.5
LINGER_SECONDS = 3.0
# Smaller factors are regarded as noise.
NOTABLE = 1.1


async def measure_sharing(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> HostSharing:
    """Measure how much longer steps of ``one`` take while ``other`` computes or lingers, and how long it lingers."""
    found = await measure_steps(one, other, prefill_tokens, rounds, note)
    gaps = list[tuple[float, float]]()
    for number in range(rounds):
        note(f"after an engine's work, {number + 1} of {rounds}")
        gaps += await _gaps_after(one, other, prefill_tokens)
    return sharing_from(found, linger_from(gaps))


async def measure_steps(
    one: Probe, other: Probe, prefill_tokens: int, rounds: int, note: Callable[[str], None]
) -> dict[Neighbour, list[Seconds]]:
    """Measure the times of steps of ``one``, by the activity of ``other``.

    The activities alternate, so that a slowdown of the machine affects all of them.
    """
    found: dict[Neighbour, list[Seconds]] = {neighbour: [] for neighbour in NEIGHBOURS}
    for number in range(rounds):
        for neighbour in NEIGHBOURS:
            note(f"next to an engine: {neighbour}, {number + 1} of {rounds}")
            async with _busy(other, neighbour, prefill_tokens):
                found[neighbour].append(await _steps(one, prefill_tokens))
    return found


def sharing_from(found: Mapping[Neighbour, Sequence[Seconds]], linger: float) -> HostSharing:
    """Return the factors, as ratios of means. Factors below 1 are noise, and become 1. ``linger`` is in seconds."""
    means = {
        neighbour: [statistics.mean(each) for each in zip(*rows, strict=True)] for neighbour, rows in found.items()
    }

    def factor(kind: int, neighbour: Neighbour) -> float:
        return max(1.0, means[neighbour][kind] / means["sleep"][kind])

    return HostSharing(
        prefill_beside_prefill=factor(0, "prefill"),
        prefill_beside_decode=factor(0, "decode"),
        decode_beside_prefill=factor(1, "prefill"),
        decode_beside_decode=factor(1, "decode"),
        prefill_beside_linger=factor(0, "linger") if linger else 1.0,
        decode_beside_linger=factor(1, "linger") if linger else 1.0,
        linger=linger,
    )


def linger_from(gaps: Sequence[tuple[float, float]]) -> float:
    """Return the seconds for which steps stay longer after a neighbour's work; 0 if there is no clear effect.

    ``gaps`` are pairs of a time since the end of that work and a step's seconds. The result is the edge of the step
    function that fits them best.
    """
    rows = np.array(sorted(gaps))
    at, sums = rows[:, 0], np.cumsum(rows[:, 1])
    cuts = np.arange(1, len(rows))
    before, after = sums[:-1] / cuts, (sums[-1] - sums[:-1]) / (len(rows) - cuts)
    # Least squares: the residuals are smallest when these are largest.
    best = int(np.argmax(cuts * before**2 + (len(rows) - cuts) * after**2))
    return float(at[best + 1]) if before[best] > NOTABLE * after[best] else 0.0


async def _gaps_after(one: Probe, other: Probe, prefill_tokens: int) -> list[tuple[float, float]]:
    """Return the decode steps of ``one`` after a prefill on ``other``: seconds since the prefill's end, and seconds."""
    step, _ = await one.decode(1, CONTEXT, STEPS)
    tokens = round(2 * LINGER_SECONDS / step)
    decoding = asyncio.create_task(one.token_times(one.fresh(CONTEXT), tokens))
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        await other.ttft(other.fresh(prefill_tokens))
        ended = asyncio.get_running_loop().time()
        times = await decoding
    finally:
        decoding.cancel()
    gaps = [(begin - ended, end - begin) for begin, end in pairwise(times)]
    return [gap for gap in gaps if 0 <= gap[0] <= LINGER_SECONDS]


async def _steps(one: Probe, prefill_tokens: int) -> Seconds:
    """Measure prefills and decode steps of ``one``. Return the mean seconds of each."""
    prefills = list[float]()
    for _ in range(PREFILLS):
        await asyncio.sleep(SLEEP_SECONDS)
        prefills.append((await one.ttft(one.fresh(prefill_tokens)))[0])
    seconds, _ = await one.decode(BATCH, CONTEXT, STEPS)
    return statistics.mean(prefills), seconds


@asynccontextmanager
async def _busy(other: Probe, neighbour: Neighbour, prefill_tokens: int) -> AsyncGenerator[None]:
    """Keep an engine busy with one activity while the context is open. Raise the error if the activity fails."""
    prompt, answer, pause = {
        "prefill": (prefill_tokens, 1, 0.0), "decode": (CONTEXT, DECODE_TOKENS, 0.0),
        "linger": (POKE_TOKENS, 1, POKE_SECONDS), "sleep": (0, 0, 0.0),
    }[neighbour]  # fmt: skip

    async def work() -> None:
        while True:
            await other.token_times(other.fresh(prompt), answer)
            await asyncio.sleep(pause)

    workers = {"sleep": 0, "decode": BATCH}.get(neighbour, 1)
    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    await asyncio.sleep(SETTLE_SECONDS)
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # a task that ended has failed: this raises its error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await asyncio.sleep(2 * SETTLE_SECONDS)


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
        for name, least in (("max_step_tokens", 128), ("repeats", 1)):
            value = getattr(self, name)
            refuse(value < least, name, f"is {value}, and must be at least {least}")


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
        sends = [tokens for tokens in self._plan.sends if tokens < longest]
        plan, rounds = self._plan, 2 * self._plan.repeats + 1
        self._steps = len(prefixed) + len(batched) + (plan.router is not None)
        router, transfer, sharing = 0.0, None, None
        if self._other is not None:
            self._steps += rounds * len(sends) + plan.same_host
        if plan.router is not None:
            self._begun += 1
            router = await measure_router(plan.router, self._engine, ROUTER_REQUESTS * plan.repeats, self._note)
        if self._other is not None:
            transfer = await self._transfer(self._other, sends, rounds)
        if self._other is not None and plan.same_host:
            self._begun += 1
            # Twice the rounds of other points, since a ratio has the noise of two measurements.
            tokens = plan.max_step_tokens // 2
            sharing = await measure_sharing(self._engine, self._other, tokens, 2 * plan.repeats, self._note)
        prefills = await self._prefills(prefixed, call)
        decodes = await self._decodes(batched)
        return Measured(
            status=status, layout=layout, call=call, prefills=prefills, decodes=decodes, transfer=transfer,
            router=router, sharing=sharing,
        )  # fmt: skip

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
        layout, seconds, probe = None, list[float](), self._engine
        while layout is None or len(seconds) < max(5, self._plan.repeats):
            began = self._clock()
            async with probe.engine.prep_recv(probe.request(probe.fresh(64), 1)) as reservation:
                layout = reservation.kv_addr_info.layout
                seconds.append(self._clock() - began)
        return layout, statistics.median(seconds)

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
            found = [await self._engine.ttft(prefix + self._engine.fresh(size)) for _ in range(self._plan.repeats)]
            usages = [output.usage for _, output in found]
            seconds = statistics.median(ttft for ttft, _ in found) - call
            tokens = int(statistics.median(usage.computed if usage is not None else size for usage in usages))
            points.append(PrefillPoint(tokens, len(prefix) + size - tokens, max(seconds, 1e-6)))
        return tuple(points)

    def _decode_sizes(self, longest: int, room: int) -> list[tuple[int, int]]:
        """Return pairs of a batch size and a number of context tokens that fit into the KV cache."""
        pairs = [(batch, context) for context in self._plan.contexts for batch in self._plan.batches]
        lengths = {pair: pair[1] + DECODE_STEPS + 2 * pair[0] for pair in pairs}
        return [pair for pair in pairs if lengths[pair] < longest and lengths[pair] * pair[0] <= room]

    async def _decodes(self, sizes: Sequence[tuple[int, int]]) -> tuple[DecodePoint, ...]:
        points = list[DecodePoint]()
        for batch, context in sizes:
            self._begin(f"decode of {batch} sequences with {context} tokens each")
            found = [await self._engine.decode(batch, context, DECODE_STEPS) for _ in range(self._plan.repeats)]
            done = round(statistics.mean(done for _, done in found))
            points.append(DecodePoint(batch, context + done, statistics.median(each for each, _ in found)))
        return tuple(points)

    async def _transfer(self, other: Probe, sizes: Sequence[int], rounds: int) -> Transfer:
        """Measure sends of cached KV of several sizes, and fit a line to their median times."""
        sent = dict[int, list[Sent]]()
        for number in range(rounds):
            for tokens in sizes:
                self._begin(f"transfer of {tokens} tokens, round {number + 1}")
                prompt = self._engine.fresh(tokens)
                await self._engine.ttft(prompt)
                request = self._engine.request(prompt, 1)
                async with other.engine.prep_recv(request) as reservation:
                    found = await self._engine.engine.remote_send(request, reservation, reservation.matched_len)
                sent.setdefault(tokens, []).append(found)
        return transfer_from(list(sent.values()))


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
    parts = {"transfer": measured.transfer, "router": plan.router, "sharing a host": measured.sharing}
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
