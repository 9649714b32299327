"""Runs the requests of batches, in turns between clients, as many at a time as interactive traffic leaves room for.

One process of a router runs them: the one that holds the lock of their directory; the others wait to take over. A
request of a batch passes the router's own layers like a client's, but behind all clients at the gate. It is put back,
not failed, if the fleet is full, no engine answers, or it has to end for others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, BinaryIO, NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Scope

from tercet.aio.tasks import TaskSet
from tercet.decisions.gaps import Gaps
from tercet.fleet import EngineFleet
from tercet.fleet.admission import Gate
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.wire import JSON
from tercet.router.batches.batch_files import Batch, BatchFiles, BatchState
from tercet.router.batches.batch_lines import BadLines, Line, Lines, answered, unanswered, write_in_order
from tercet.router.observe.metrics import Metrics
from tercet.wire.serving.server_access import OF_BATCH

logger = logging.getLogger("tercet.router")
# Seconds between two looks at the load, between two looks at the directory, and between two deletions of old files.
LOOK_S, FOLLOW_S, SWEEP_S = 0.1, 1.0, 3600.0
# Seconds until a batch whose request was put back, or a directory that cannot be written, is tried again.
AGAIN_S = 2.0
# Seconds for a request that must end to free its slot.
LEAVE_S = 10.0
# Answers after which a request is run again later: its fleet is full, ends, or has no engine.
PUT_BACK = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class Answer(NamedTuple):
    """A whole answer of the router."""

    status: int
    body: bytes


@dataclass(eq=False)
class RunningLine:
    """One request that runs; ``left`` ends it, as if its client had left."""

    index: int
    left: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class RunningBatch:
    """A batch whose lines are checked, and its results."""

    batch: Batch
    lines: Lines
    state: BatchState
    results: BinaryIO
    running: dict[int, RunningLine] = field(default_factory=dict[int, RunningLine])
    paused_until: float = 0.0
    paused_for: str = ""  # the reason that was logged
    is_written: bool = True
    ends_as: str = ""  # set once no more of its lines begin
    # Held while its state is written: a write in a thread must not end after that of a newer state.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.batch.asked.id


class BatchRunner:
    """The batches of one directory; ``app`` serves their requests, and ``gate`` and ``fleet`` tell the load."""

    def __init__(
        self, files: BatchFiles, app: ASGIApp, gate: Gate, fleet: EngineFleet, metrics: Metrics, gaps: Gaps,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._files, self._app, self._gate, self._fleet = files, app, gate, fleet
        self._metrics, self._gaps, self._is_ending = metrics, gaps, is_ending
        self._batches: dict[str, RunningBatch] = {}
        self._checking = set[str]()
        self._tasks = TaskSet()
        self._turns = itertools.count()
        self._served: dict[str, int] = {}  # by owner, the turn of its last request
        self._allowed, self._peak, self._is_over = 0, 0, False  # the peak is the most that ran since the last look
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """Run batches until cancelled, or until the router shuts down. Requests that run then are run again later."""
        while not await self._take_turn():  # noqa: ASYNC110 - other processes hold it
            await asyncio.sleep(FOLLOW_S)
        self._is_over = False
        now = asyncio.get_running_loop().time
        followed = swept = float("-inf")
        try:
            while not self._is_ending():
                if now() - swept >= SWEEP_S:
                    swept = now()
                    await asyncio.to_thread(self._files.sweep)
                if now() - followed >= FOLLOW_S:
                    followed = now()
                    await self._follow()
                self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            self._is_over = True
            for each in self._lines_running():
                each.left.set()
            await self._tasks.wait(LEAVE_S)  # answers that have come are recorded
            await self._tasks.close()
            for batch in self._batches.values():
                batch.results.close()
            self._batches.clear()
            self._checking.clear()
            self._measure()
            self._files.turn.release()

    async def _take_turn(self) -> bool:
        turn, taking = self._files.turn, asyncio.ensure_future(asyncio.to_thread(self._files.turn.take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:  # the thread may take it in a moment
            taking.add_done_callback(lambda _: turn.release())
            raise

    # ---- batches -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take new batches, end those that are cancelled or too old, and write how far each has come."""
        for found in await asyncio.to_thread(self._files.open_batches):
            running = self._batches.get(found.asked.id)
            if running is None:
                if found.asked.id not in self._checking:
                    # In the background: checking a file of 50,000 lines must not delay the other batches.
                    self._checking.add(found.asked.id)
                    self._tasks.spawn(self._begin(found), "batch")
                continue
            if not running.ends_as and found.is_cancelled:
                await self._end(running, "cancelled")
            elif not running.ends_as and found.asked.expires_at <= self._files.clock():
                await self._end(running, "expired")
        for batch in (all_running := [*self._batches.values()]):
            if not batch.is_written:
                await self._write(batch)
        owners = {each.batch.asked.owner for each in all_running}
        # In a thread, as all that touches the directory: it may be on a file system that hangs.
        full = await asyncio.to_thread(self._files.without_room, owners) if owners else ()
        for batch in all_running:
            if batch.batch.asked.owner in full:
                self._pause(batch, "the storage of batches is full: delete files, or raise batch-storage")

    async def _begin(self, found: Batch) -> None:
        """Check the lines of a batch, and let them run."""
        asked, files = found.asked, self._files
        try:
            # The list that shows it as open may be older than its end.
            found = await asyncio.to_thread(files.batch, asked.owner, asked.id)
            if found.has_ended:
                return
            try:
                record = await asyncio.to_thread(files.file, asked.owner, asked.input_file_id)
                path, results = files.content_path(record), files.results_path(asked.id)
                # With the results of an earlier run: lines that have one are not run again.
                lines = await asyncio.to_thread(Lines, path, asked, results)
            except BadLines as bad:
                state = found.state.now("failed", files.clock(), errors=bad.faults)
                await asyncio.to_thread(files.write_state, asked.id, state)
                logger.warning("batch %s failed: its file has %d faults", asked.id, len(bad.faults))
                return
            state = replace(found.state, counts=lines.counts)
            if state.status == "validating":
                state = state.now("in_progress", files.clock())
            await asyncio.to_thread(files.write_state, asked.id, state)
            file: BinaryIO = await asyncio.to_thread(results.open, "ab", 0)  # type: ignore[assignment]
            self._batches[asked.id] = batch = RunningBatch(found, lines, state, file)
            logger.info("batch %s: %d of %d requests are left", asked.id, len(lines.left), len(lines))
            await self._finish_if_done(batch)
        finally:
            self._checking.discard(asked.id)

    async def _end(self, batch: RunningBatch, status: str) -> None:
        """Let no more lines of a batch begin, and end those that run."""
        batch.ends_as = status
        if status == "cancelled":
            batch.state = batch.state.now("cancelling", self._files.clock())
            await self._write(batch)
        for each in batch.running.values():
            each.left.set()
        await self._finish_if_done(batch)

    async def _write(self, batch: RunningBatch) -> None:
        """Write how far a batch has come, unless its last state is being written."""
        async with batch.writing:
            if self._batches.get(batch.id) is batch:
                batch.is_written = True
                await asyncio.to_thread(self._files.write_state, batch.id, batch.state)

    async def _finish_if_done(self, batch: RunningBatch) -> None:
        if batch.running or self._batches.get(batch.id) is not batch or (batch.lines.left and not batch.ends_as):
            return
        del self._batches[batch.id]
        self._checking.add(batch.id)  # until its end is written, the directory still shows it as open
        self._tasks.spawn(self._finish(batch), "batch's end")

    async def _finish(self, batch: RunningBatch) -> None:
        try:
            async with batch.writing:
                batch.state = await asyncio.to_thread(self._written, batch)
        except OSError as error:
            logger.error("batch %s cannot be finished and is tried again: %s", batch.id, error)
            await asyncio.sleep(AGAIN_S)
        else:
            counts = batch.state.counts
            logger.info("batch %s is %s: %d succeeded, %d failed", batch.id, batch.state.status, counts.completed,
                        counts.failed)  # fmt: skip
        finally:
            batch.results.close()
            self._checking.discard(batch.id)

    def _written(self, batch: RunningBatch) -> BatchState:
        """Write the output file and the error file of a batch that ends, and its last state. Blocking."""
        files, asked, results = self._files, batch.batch.asked, self._files.results_path(batch.id)
        status: Any = batch.ends_as or "completed"
        if status == "expired":
            for index in batch.lines.left:
                line = batch.lines.read(index)
                why = f"the completion window of {asked.completion_window} ended before this request ran"
                batch.results.write(unanswered(index, line, "batch_expired", why))
        if status == "completed":
            batch.state = batch.state.now("finalizing", files.clock())
            files.write_state(batch.id, batch.state)
        paths = {name: results.with_name(name) for name in ("output", "errors")}
        completed, failed = write_in_order(results, paths["output"], paths["errors"])
        found: dict[str, str | None] = {"output": None, "errors": None}
        for (name, path), number in zip(paths.items(), (completed, failed), strict=True):
            if number:
                found[name] = files.adopt_file(asked.owner, f"{batch.id}_{name}.jsonl", path).id
            else:
                path.unlink()
        counts = replace(batch.state.counts, completed=completed, failed=failed)
        state = batch.state.now(
            status, files.clock(), counts=counts, output_file_id=found["output"], error_file_id=found["errors"]
        )
        files.write_state(batch.id, state)
        with suppress(FileNotFoundError):
            results.unlink()
        return state

    # ---- requests ------------------------------------------------------------------------------------------------

    def _lines_running(self) -> list[RunningLine]:
        return [line for batch in self._batches.values() for line in batch.running.values()]

    def _look(self) -> None:
        """Start requests, or end some, by the load of the fleet."""
        last = self._fleet.knowledge.loads.last
        loads = [known[0] if (known := last(each.name)) else None for each in self._fleet.open if each.can("decode")]
        running = [line for line in self._lines_running() if not line.left.is_set()]
        # The peak, not the present number: short answers may all have ended just before the look.
        self._allowed = self._gaps.look(loads, self._gate.clients_wait, self._peak)
        self._peak = len(running)
        for line in running[self._allowed :]:  # the oldest began first, and are nearest to their ends
            line.left.set()
        self._fill()

    def _fill(self) -> None:
        running = len(self._lines_running())
        while not (self._is_over or self._is_ending()) and running < self._allowed:
            batch = self._next()
            if batch is None:
                break
            line = RunningLine(batch.lines.left.popleft())
            batch.running[line.index] = line
            self._served[batch.batch.asked.owner] = next(self._turns)
            self._tasks.spawn(self._serve(batch, line), "batch's request")
            running += 1
            self._peak = max(self._peak, running)
        self._measure()

    def _next(self) -> RunningBatch | None:
        """Return the batch whose request begins next: clients take turns; of one client, the oldest batch."""
        now = asyncio.get_running_loop().time()
        ready = [
            batch for batch in self._batches.values()
            if batch.lines.left and not batch.ends_as and batch.paused_until <= now
        ]  # fmt: skip
        return min(
            ready, default=None, key=lambda each: (self._served.get(each.batch.asked.owner, -1), each.batch.asked.id)
        )

    async def _serve(self, batch: RunningBatch, running: RunningLine) -> None:
        """Run one request, and record its answer or put it back."""
        is_done = False
        try:
            line = await asyncio.to_thread(batch.lines.read, running.index)
            request_id = f"{batch.id}-{running.index}-{next(self._numbers)}"
            answer = await self._answer(batch, line, request_id, running.left)
            if answer is None:
                return
            # Not a result: the client asked for an answer within its window, and there is time left.
            if answer.status in PUT_BACK:
                self._pause(batch)
                return
            record = answered(running.index, line, answer.status, request_id, answer.body)
            # Shielded: an answer that has come is recorded, also if the router ends now.
            await asyncio.shield(asyncio.to_thread(batch.results.write, record))
            is_done = True
            result = "completed" if answer.status < HTTPStatus.BAD_REQUEST else "failed"
            counts = replace(batch.state.counts, **{result: getattr(batch.state.counts, result) + 1})
            batch.state, batch.is_written = replace(batch.state, counts=counts), False
            self._metrics.batch_requests.labels(result).inc()
        except OSError as error:
            self._pause(batch, f"its results cannot be written: {error}")
        finally:
            del batch.running[running.index]
            if not is_done:
                # In front: it has waited longest, and its prompt may still be cached.
                batch.lines.left.appendleft(running.index)
                self._metrics.batch_requests.labels("put_back").inc()
            await self._finish_if_done(batch)
            self._fill()

    async def _answer(self, batch: RunningBatch, line: Line, request_id: str, left: asyncio.Event) -> Answer | None:
        """Return the router's answer to one request; None if the request had to end before it."""
        content = msgspec.json.encode(line.body)
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": line.url, "raw_path": line.url.encode(), "query_string": b"", "root_path": "",
            "headers": [
                (b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode()),
                (REQUEST_ID_HEADER.encode(), request_id.encode()),
            ],
            "client": ("batch", 0), "server": None, OF_BATCH: batch.batch.asked.owner,
        }  # fmt: skip
        unread, status, parts = [content], [0], list[bytes]()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            else:
                parts.append(message.get("body", b""))

        serving = asyncio.ensure_future(self._app(scope, receive, send))
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await asyncio.wait({serving}, timeout=LEAVE_S)
                return None
            serving.result()
            return Answer(status[0], b"".join(parts))
        finally:
            left.set()
            leaving.cancel()
            serving.cancel()

    def _pause(self, batch: RunningBatch, why: str = "") -> None:
        """Let no request of a batch begin for a moment; a reason is logged when it is another one than the last."""
        batch.paused_until = asyncio.get_running_loop().time() + AGAIN_S
        if why and why != batch.paused_for:
            logger.warning("batch %s waits %g s: %s", batch.id, AGAIN_S, why)
        batch.paused_for = why

    def _measure(self) -> None:
        self._metrics.batch_running.set(len(self._lines_running()))
