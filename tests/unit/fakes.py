"""An engine in memory, which keeps count of what is taken from it, and can be told to fail or to wait."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from msgspec import structs

from tercet.protocol import (
    EngineStatus,
    KVAddrInfo,
    KVLayout,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    TercetError,
    Usage,
)

LAYOUT = KVLayout("m", "float32", 2, 1, 8, 16, 1024, 1, "test")
BLOCK = LAYOUT.block_size


def stream_of(outputs: AsyncGenerator[Output, None]) -> OutputStream:
    """The stream of what a generator yields, which is asked for the next when the one before has been consumed."""

    async def produce(stream: OutputStream) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                stream.put(output)
                await stream.until_asked()
                if stream.over:
                    return

    return OutputStream(produce)


class FakeEngine:
    """Generates `prompt[-1] + 1, + 2, ...` so that a token tells which position it is for."""

    def __init__(self, name: str, matched: int = 0) -> None:
        self._name = name
        self.matched = matched
        self.tier_len = 0
        self.calls: list[tuple] = []
        self.leases: set[str] = set()
        self.running = 0
        self.failures: dict[str, TercetError] = {}
        self.pause = asyncio.Event()
        self.pause.set()
        self.fail_after: int | None = None
        self._limit: int | None = None
        self._more = asyncio.Event()
        self.breaks_off: Output | None = None
        self.on_request: Callable[[Request], object] = lambda _: None

    @property
    def name(self) -> str:
        return self._name

    def let(self, limit: int | None) -> None:
        """Generations go on until they have so many tokens of output, and wait then."""
        self._limit = limit
        self._more.set()

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        return self._prep_recv(request, end)

    @asynccontextmanager
    async def _prep_recv(self, request: Request, end: int | None) -> AsyncGenerator[Reservation]:
        await self._enter("prep_recv", end)
        resolved = request.num_tokens if end is None else end
        lease = uuid.uuid4().hex
        matched = min(self.matched, resolved // BLOCK * BLOCK)
        self.leases.add(lease)
        try:
            info = KVAddrInfo(lease, self.name, matched, resolved, "fake", (), LAYOUT)
            yield Reservation(info, matched, self.tier_len)
        finally:
            self.leases.discard(lease)

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        await self._enter("extend_recv", end)
        resolved = request.num_tokens if end is None else end
        return structs.replace(reservation, kv_addr_info=structs.replace(reservation.kv_addr_info, end=resolved))

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        self.running += 1
        try:
            await self._enter("remote_send", begin, end, sample)
        finally:
            self.running -= 1
        stop = to.end if end is None else end
        if cached_only:
            stop = max(begin, min(stop, self.matched) // BLOCK * BLOCK)
            return Sent(begin, stop, (stop - begin) * 8, 1, 0.0, Usage(cached=stop if stop > begin else 0))
        wanted = request.sampling_params.get("max_tokens", 3)
        finish = "length" if wanted == 1 else None
        first = Output((request.prompt[-1] + 1,), finish) if sample else None
        return Sent(begin, stop, (stop - begin) * 8, 1, 0.0, Usage(computed=stop), first)

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        return stream_of(self._outputs(request, begin, output))

    async def _outputs(self, request: Request, begin: int, output: Sequence[int]) -> AsyncGenerator[Output, None]:
        self.running += 1
        self.on_request(request)
        try:
            await self._enter("start_generate", begin, tuple(output))
            if self.breaks_off is not None:
                yield self.breaks_off
                return
            wanted = request.sampling_params.get("max_tokens", 3)
            for position in range(len(output), wanted):
                await self.pause.wait()
                while self._limit is not None and position >= self._limit:
                    self._more.clear()
                    await self._more.wait()
                if self.fail_after is not None and position >= self.fail_after:
                    raise self.failures["stream"]
                last = position == wanted - 1
                usage = Usage(computed=1) if position == len(output) else None
                yield Output((request.prompt[-1] + 1 + position,), "length" if last else None, usage=usage)
        finally:
            self.running -= 1

    async def status(self) -> EngineStatus:
        raise NotImplementedError

    async def _enter(self, verb: str, *args: object) -> None:
        self.calls.append((verb, *args))
        await self.pause.wait()
        await asyncio.sleep(0)
        if verb in self.failures:
            raise self.failures[verb]

    @property
    def verbs(self) -> list[str]:
        return [call[0] for call in self.calls]
