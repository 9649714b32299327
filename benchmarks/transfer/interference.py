"""The effect of receiving KV on a real engine that decodes, with a sender that pushes as fast as possible."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import queue
import random
import secrets
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import aiohttp
import msgspec
from benchmarks.transfer.cases import MIB
from benchmarks.transfer.unsignalled import start_unsignalled

from tercet.protocol import Content, EngineError, KVAddrInfo, TercetError, content_of, packed
from tercet.protocol.sse import read_answer
from tercet.transport import HeadSlice, KVRegion, RankTransport, SendDestination, SendReport, TransportSettings
from tercet.transport.inbound import Turn
from tercet.wire.client.bounded_answers import reason_of

LEASED_TOKENS = 2048
MEMCPY = "memcpy"
COPIED_MIB = 48  # the size of the lease for SmolLM2; larger than CPU caches
ACK_SECONDS = 60.0
# Offset of an engine's planes in their first page: PyTorch aligns tensors to it. With an offset that differs from the
# receiver's, loads would wait for stores with the same last 12 bits of the address.
PLANE_OFFSET = 64


Begin = Callable[[aiohttp.ClientSession], Awaitable["_Flood | _PlainCopy"]]


class Interference(msgspec.Struct, frozen=True):
    """The decode steps of an engine, as medians in seconds, and the rate of pushes to it, in 10^9 bytes/s."""

    step_alone: float
    step_receiving: float
    gb_per_s: float
    transport: str

    @property
    def slowdown(self) -> float:
        """Ratio of the step time while receiving to the step time alone."""
        return self.step_receiving / self.step_alone


def measure_interference(engine: str, rounds: int, tokens: int, settings: TransportSettings | None) -> Interference:
    """Decode ``tokens`` tokens on the engine at URL ``engine``, alone and while it receives, in turn, ``rounds`` times.

    With None for ``settings``, the engine receives nothing; another process copies memory instead, on the CPUs of this
    process. A receiver of the same rate cannot disturb less.

    Raise :class:`~tercet.protocol.TercetError` if the engine refuses or a push fails.
    """

    async def begin(session: aiohttp.ClientSession) -> _Flood | _PlainCopy:
        return _PlainCopy() if settings is None else await _Flood.begin(session, engine, settings)

    try:
        return asyncio.run(_measure(engine, rounds, tokens, begin))
    except aiohttp.ClientError as error:
        raise EngineError(f"{engine} does not answer: {reason_of(error)}") from error


async def _measure(engine: str, rounds: int, tokens: int, begin: Begin) -> Interference:
    async with aiohttp.ClientSession() as session:
        model = (await _get(session, f"{engine}/v1/models"))["data"][0]["id"]
        vocabulary = range(1000, 20000)
        alone: list[float] = []
        receiving: list[float] = []
        rates: list[float] = []
        transport = ""
        for number in range(rounds + 1):
            quiet = await _steps(session, engine, model, vocabulary, tokens)
            with await begin(session) as flood:
                busy = await _steps(session, engine, model, vocabulary, tokens)
            await flood.release(session)
            transport = flood.transport
            if number:
                alone += quiet
                receiving += busy
                rates.append(flood.rate)
        return Interference(
            statistics.median(alone), statistics.median(receiving), statistics.median(rates), transport
        )  # fmt: skip


async def _steps(
    session: aiohttp.ClientSession, engine: str, model: str, vocabulary: range, tokens: int
) -> list[float]:
    """Generate one stream. Return the times between its tokens, in seconds."""
    body = {
        "model": model, "prompt": random.choices(vocabulary, k=32), "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    async with session.post(f"{engine}/v1/completions", json=body) as response:
        if response.status != 200:
            raise EngineError(f"{engine} refused to generate: {(await response.text())[:300]}")
        times = [time.perf_counter() async for _ in read_answer(response.content.iter_any())]
    return [after - before for before, after in itertools.pairwise(times[1:])]


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, list[dict[str, str]]]:
    async with session.get(url) as response:
        if response.status != 200:
            raise EngineError(f"{url} answered {response.status}")
        return await response.json()


class _PlainCopy:
    """A separate process that copies memory of the size of a flood repeatedly, while the context is open."""

    transport = MEMCPY

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._result, self._theirs = context.Pipe()
        self._process = context.Process(target=_copy, args=(self._theirs,), daemon=True)
        self.rate = 0.0

    def __enter__(self) -> _PlainCopy:
        try:
            start_unsignalled(self._process)
            self._theirs.close()  # so that the end of the process closes the pipe
            self._heard()  # the process has its memory
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._result.send(None)
            self.rate = self._heard()
        except OSError as error:
            raise EngineError("the process that copies memory ended early") from error
        finally:
            self._end()

    def _end(self) -> None:
        self._theirs.close()
        self._result.close()
        if self._process.pid is not None:
            self._process.join()

    def _heard(self) -> float:
        try:
            return self._result.recv() or 0.0
        except EOFError as error:
            raise EngineError("the process that copies memory ended early") from error

    async def release(self, session: aiohttp.ClientSession) -> None:
        """Do nothing: there is no reservation."""


def _copy(pipe: Connection) -> None:
    source, target = (memoryview(bytearray(random.randbytes(MIB) * COPIED_MIB)) for _ in range(2))
    turn, moved = Turn(), 0
    pipe.send(None)
    began = time.perf_counter()
    while not pipe.poll():
        for at in range(0, len(source), MIB):
            target[at : at + MIB] = source[at : at + MIB]
            turn.took(MIB)
        moved += len(source)
    with suppress(OSError):  # the parent no longer waits for the result
        pipe.send(moved / (time.perf_counter() - began) / 1e9)


class _Flood:
    """A thread that pushes KV into one reservation repeatedly, while the context is open."""

    def __init__(
        self, engine: str, seq_id: str, info: KVAddrInfo, content: Content, settings: TransportSettings
    ) -> None:
        layout = info.layout
        self._content = content
        self._engine, self._seq_id, self._info = engine, seq_id, info
        self._slots = -(-(info.end - info.begin) // layout.block_size)
        self._layers = layout.num_layers
        self._region = KVRegion.create(layout.num_layers, self._slots + 1, layout.block_bytes, PLANE_OFFSET)
        for layer in range(layout.num_layers):
            self._region.blocks(layer, 0, self._slots + 1)[:] = bytes((self._slots + 1) * layout.block_bytes)
        self._transport = RankTransport(self._region, layout.exchange_key, settings)
        self._to = SendDestination(info.ranks[0].addresses, HeadSlice(0, layout.block_bytes))
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._moved, self._seconds = 0, 0.0
        self._error: TercetError | None = None
        self.transport = ""

    @classmethod
    async def begin(cls, session: aiohttp.ClientSession, engine: str, settings: TransportSettings) -> _Flood:
        """Reserve blocks on the engine, and return the flood for them."""
        seq_id = secrets.token_hex(8)
        prompt = random.choices(range(1000, 20000), k=LEASED_TOKENS)
        async with session.post(f"{engine}/tercet/v1/prep_recv", json={"seq_id": seq_id, "prompt": prompt}) as response:
            if response.status != 200:
                raise EngineError(f"{engine} refused prep_recv: {(await response.text())[:300]}")
            answer = await response.json()
        info = msgspec.convert(answer["kv_addr_info"], KVAddrInfo)
        return cls(engine, seq_id, info, content_of(packed(prompt), None), settings)

    @property
    def rate(self) -> float:
        """Rate of the pushes in 10^9 bytes per second."""
        return self._moved / self._seconds / 1e9

    def _run(self) -> None:
        outcomes: queue.SimpleQueue[SendReport | TercetError] = queue.SimpleQueue()
        began = time.perf_counter()
        while not self._enough.is_set() and self._error is None:
            send = secrets.token_hex(8)
            self._transport.sends.open(send, self._info.lease, self._content, [self._to], outcomes.put)
            # Without the first block, the blocks after it never become valid, and are written each time.
            self._transport.sends.push(send, range(self._layers), 1, range(2, self._slots + 1))
            begin = self._info.begin + self._info.layout.block_size
            self._transport.sends.finish(send, begin, self._info.end)
            outcome = outcomes.get(timeout=ACK_SECONDS)
            if isinstance(outcome, TercetError):
                self._error = outcome
            else:
                self._moved += outcome.bytes
                self.transport = outcome.transport
        self._seconds = time.perf_counter() - began

    def __enter__(self) -> _Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
        self._transport.close()
        self._region.close()
        if self._error is not None:
            raise self._error

    async def release(self, session: aiohttp.ClientSession) -> None:
        """End the reservation.

        Its KV is zeros, so its blocks must not be used again: the prompt was random tokens.
        """
        async with session.post(f"{self._engine}/tercet/v1/abort", json={"seq_id": self._seq_id}) as response:
            await response.read()
