"""The sending of a plan's requests, each when it is due or when a user is free, and the display of progress.

On a terminal, progress is one line that is rewritten; elsewhere, plain lines. It is written without a library, since
every millisecond that it takes is an error in the time of a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol, TextIO

from tercet.aio import TaskSet
from tercet_lab.bench.compose import Composer
from tercet_lab.bench.openai_client import Client, PreparedCall
from tercet_lab.bench.results import RequestRecord
from tercet_lab.bench.stream_reader import Reading


class TrafficObserver(Protocol):
    """An observer of the progress of a run."""

    def due(self) -> None:
        """Record that a request is due."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """Record that a request has ended."""
        ...


class Traffic:
    """One run of a plan against a target. At the end, every request that was due has a record, also after a failure.

    - With ``due``, conversation ``i`` begins at ``due[i]`` seconds after the client's origin, at any speed of the
      target. ``concurrency`` limits the requests in flight; the scheduled time of a request includes no wait for that.
    - Without ``due``, each of ``concurrency`` users holds one conversation after the other.
    """

    def __init__(
        self,
        client: Client,
        plan: Sequence[Composer],
        due: Sequence[float] | None,
        concurrency: int | None,
        observer: TrafficObserver,
    ) -> None:
        self._client = client
        self._plan = plan
        self._due = due
        self._observer = observer
        self._users = concurrency or 1
        slots = asyncio.Semaphore(concurrency) if concurrency and due is not None else None
        self._slot: AbstractAsyncContextManager[Any] = slots or nullcontext()
        self._tasks = TaskSet()
        self._records: list[RequestRecord] = []
        self._broken: BaseException | None = None
        self.interrupted = False

    def interrupt(self) -> None:
        """Send no more requests, and end those in flight. :meth:`run` then returns the results so far."""
        self.interrupted = True
        # Not immediately: a task that is cancelled before its first step never runs, and would leave no record.
        asyncio.get_running_loop().call_soon(self._tasks.cancel)

    async def run(self) -> list[RequestRecord]:
        """Send all requests. Return the records, sorted by index, when all requests have ended."""
        if self.interrupted:
            return []
        if self._due is None:
            waiting = list(reversed(self._plan))
            for _ in range(min(self._users, len(waiting))):
                self._start(self._user(waiting))
        else:
            self._start(self._dispatch(self._due))
        try:
            while not await self._tasks.wait():
                pass  # running tasks have started others
        finally:
            self._tasks.cancel()
        if self._broken is not None:
            raise self._broken
        return sorted(self._records, key=lambda record: record.index)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(work).add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error  # a bug in this code: failures of the target are in records
            self.interrupt()

    async def _dispatch(self, due: Sequence[float]) -> None:
        for composer, at in zip(self._plan, due, strict=True):
            await self._until(at)
            if self.interrupted:
                return
            self._start(self._converse(composer, at))

    async def _user(self, waiting: list[Composer]) -> None:
        while waiting and not self.interrupted:
            await self._converse(waiting.pop(), self._client.now())

    async def _converse(self, composer: Composer, scheduled: float) -> None:
        call: PreparedCall | None = composer.first
        while call is not None:
            reading, record = await self._send(call, scheduled)
            if record.failure is not None:
                self._give_up(composer, record)
                return
            call = composer.heard(reading)
            if call is not None:
                scheduled = record.end + composer.think_time
                await self._until(scheduled)

    async def _send(self, call: PreparedCall, scheduled: float) -> tuple[Reading, RequestRecord]:
        self._observer.due()
        try:
            async with self._slot:
                answer = await self._client.send(call, scheduled)
        except asyncio.CancelledError:  # while it waited for a slot
            answer = self._client.never_sent(call, scheduled)
        self._note(answer.record)
        return answer.reading, answer.record

    def _give_up(self, composer: Composer, failed: RequestRecord) -> None:
        """Record the turns after a failed turn: they were due too, and count as separate failures."""
        for call in () if failed.failure == "interrupted" else composer.unsent():
            self._note(
                RequestRecord(
                    index=call.index, scheduled=failed.end, sent=failed.end, end=failed.end, failure="unsent",
                    error=f"request {failed.index}, an earlier turn of this session, failed",
                    planned_output=call.planned_output, warmup=call.warmup, phase=call.phase, group=call.group,
                )
            )  # fmt: skip

    def _note(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._observer.ended(record)

    async def _until(self, at: float) -> None:
        if (delay := at - self._client.now()) > 0:
            await asyncio.sleep(delay)


TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0
BAR = 20
RECENT = 50


class LiveProgress:
    """The live display of one point: an observer of its traffic, and an async context manager around the point."""

    def __init__(self, title: str, total: int, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._title = title
        self._total = total
        self._began = time.monotonic()
        self._due = self._over = self._failed = self._tokens = 0
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self._tpot: deque[float] = deque(maxlen=RECENT)
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveProgress:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._terminal:
            self._write("\r\x1b[K")

    def due(self) -> None:
        """Record that a request is due."""
        self._due += 1

    def ended(self, record: RequestRecord) -> None:
        """Record that a request has ended."""
        self._over += 1
        self._failed += not record.ok
        self._tokens += record.output_tokens
        if record.ok and record.ttft is not None:
            self._ttft.append(record.ttft)
        if record.ok and record.tpot is not None:
            self._tpot.append(record.tpot)

    def line(self) -> str:
        """Return the state in one line. Latencies are means over the last requests."""
        seconds = time.monotonic() - self._began
        parts = [f"{self._over}/{self._total}", f"{max(0, self._due - self._over)} in flight"]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [f"TTFT {_mean(self._ttft):.0f} ms"] if self._ttft else []
        parts += [f"TPOT {_mean(self._tpot):.1f} ms"] if self._tpot else []
        return f"{self._title}: " + ", ".join([*parts, f"{self._tokens / seconds:.0f} tokens/s", f"{seconds:.0f} s"])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)
            if self._terminal:
                filled = BAR * self._over // max(1, self._total)
                self._write(f"\r\x1b[K[{'#' * filled}{'.' * (BAR - filled)}] {self.line()}")
            else:
                self._write(f"{self.line()}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a closed pipe must not stop the run
            self._out.write(text)
            self._out.flush()


def _mean(seconds: deque[float]) -> float:
    return sum(seconds) / len(seconds) * 1000
