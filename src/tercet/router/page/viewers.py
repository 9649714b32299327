"""The viewers of the page: one producer makes each frame once for all of them, as long as there are viewers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import cached_property

import msgspec
from msgspec.structs import replace

from tercet.aio import TaskSet
from tercet.protocol import NoSpace, ShuttingDown
from tercet.router.page.other_workers import OtherWorkers
from tercet.router.page.records import Frame, encoded, for_clients
from tercet.router.page.watch import FleetWatch

INTERVAL_S, LARGE_INTERVAL_S, LARGE = 0.5, 1.0, 200
"""Seconds between two frames, also for fleets of more than :data:`LARGE` engines, and that number of engines."""
MOST_VIEWERS, FOR_ADMINS = 32, 4
"""Most pages that watch a process, and the number among them that clients cannot take."""
MOST_PENDING = 6
"""Largest number of frames that wait for a slow viewer; beyond it the viewer gets one whole frame when it reads."""


class EncodedFrame:
    """A frame, encoded at most once for administrators and once for clients."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    @cached_property
    def _for_admins(self) -> bytes:
        return encoded([self._frame])

    @cached_property
    def _for_clients(self) -> bytes:
        return encoded([for_clients(self._frame)])

    @cached_property
    def line(self) -> bytes:
        """The frame as a line of JSON, for another worker."""
        return msgspec.json.encode(self._frame) + b"\n"

    def bytes_for(self, admin: bool) -> bytes:
        """Return the frame as a server-sent event, for administrators or for clients."""
        return self._for_admins if admin else self._for_clients


class Viewer:
    """One open page, with the frames that it has not read yet: at most :data:`MOST_PENDING`."""

    def __init__(self, admin: bool) -> None:
        self.admin = admin
        self.is_behind = True
        self.has_left = False
        self._pending: deque[EncodedFrame] = deque()
        self._woken = asyncio.Event()

    def give(self, frame: EncodedFrame) -> None:
        """Add a frame; a viewer that is behind keeps none, since it needs a whole frame."""
        if len(self._pending) >= MOST_PENDING:
            self._pending.clear()
            self.is_behind = True
        if not self.is_behind:
            self._pending.append(frame)
        self._woken.set()

    def encoded(self, frame: EncodedFrame) -> bytes:
        """Return the bytes of a frame for this viewer."""
        return frame.bytes_for(self.admin)

    def leave(self) -> None:
        """End the viewer's stream."""
        self.has_left = True
        self._woken.set()

    async def next(self, whole: Callable[[], EncodedFrame]) -> bytes | None:
        """Wait for frames and return their bytes; None at the end. The producer wakes it at every frame."""
        while not self.has_left:
            await self._woken.wait()
            self._woken.clear()
            if self.has_left:
                break
            if self.is_behind:
                self.is_behind = False
                self._pending.clear()
                return self.encoded(whole())
            if self._pending:
                found = b"".join(map(self.encoded, self._pending))
                self._pending.clear()
                return found
        return None


class Worker(Viewer):
    """Another worker of this router that shows a page, and gets this worker's frames."""

    def __init__(self) -> None:
        super().__init__(admin=True)

    def encoded(self, frame: EncodedFrame) -> bytes:
        return frame.line


class Viewers:
    """All viewers of this process. ``watch`` starts an observation, ``engines`` returns the number of engines.

    ``is_over`` is called at each frame; when it returns True, every stream ends. ``others`` are the router's other
    workers, None if there are none.
    """

    def __init__(
        self, watch: Callable[[], FleetWatch], engines: Callable[[], int], is_over: Callable[[], bool] = lambda: False,
        others: OtherWorkers | None = None,
    ) -> None:  # fmt: skip
        self._others = others
        self._follows = False
        self._new_watch = watch
        self._engines = engines
        self._is_over = is_over
        self._viewers: set[Viewer] = set()
        self._tasks = TaskSet()
        self._is_producing = False
        self._whole: EncodedFrame | None = None
        self._watch: FleetWatch | None = None

    def __len__(self) -> int:
        return len(self._viewers)

    def enter(self, admin: bool) -> Viewer:
        """Add a viewer, until :meth:`leave` or the end of its stream.

        Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.ShuttingDown`.
        """
        if self._is_over():
            raise ShuttingDown("this router is shutting down, so its page is closed")
        most = MOST_VIEWERS if admin else MOST_VIEWERS - FOR_ADMINS
        if sum(not isinstance(each, Worker) for each in self._viewers) >= most:
            kept = "" if admin else f", and {FOR_ADMINS} more places are for administrators"
            raise NoSpace(f"{most} pages watch this router process already{kept}; close one of them")
        return self._enter(Viewer(admin))

    def enter_worker(self) -> Viewer:
        """Add another worker as a viewer, as :meth:`enter` does for a page."""
        if self._is_over():
            raise ShuttingDown("this router is shutting down, so its page is closed")
        return self._enter(Worker())

    def _enter(self, viewer: Viewer) -> Viewer:
        self._viewers.add(viewer)
        if self._others is not None and not self._follows and not isinstance(viewer, Worker):
            self._follows = True
            self._others.begin()
        if not self._is_producing:
            self._is_producing = True
            self._tasks.spawn(self._produce(), "page")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; a second call has no effect."""
        viewer.leave()
        self._viewers.discard(viewer)

    async def stream(self, viewer: Viewer) -> AsyncGenerator[bytes]:
        """Yield the bytes to send to a viewer that has entered, until it leaves."""
        try:
            whole = self._own_whole if isinstance(viewer, Worker) else self._current
            while (found := await viewer.next(whole)) is not None:
                yield found
        finally:
            self.leave(viewer)

    async def close(self) -> None:
        """End every stream."""
        for viewer in self._viewers:
            viewer.leave()
        await self._tasks.close()

    def _current(self) -> EncodedFrame:
        """Return the whole state at the last frame, for a viewer that a frame has woken."""
        if self._whole is None:
            assert self._watch is not None
            whole = self._watch.whole()
            self._whole = EncodedFrame(self._others.join_whole(whole) if self._others and self._follows else whole)
        return self._whole

    def _own_whole(self) -> EncodedFrame:
        assert self._watch is not None
        return EncodedFrame(self._watch.whole())

    def _follow_no_more(self) -> None:
        """Stop following other workers, unless a page is open."""
        if self._others is not None and self._follows and all(isinstance(each, Worker) for each in self._viewers):
            self._follows = False
            self._others.end()

    async def _produce(self) -> None:
        """Produce frames while there are viewers; the service is not observed at other times."""
        try:
            watch = self._watch = self._new_watch()
            while self._viewers and not self._is_over():
                if self._others:
                    watch.heard(self._others.ttfts())
                own = watch.frame()
                mine = EncodedFrame(replace(own, ttfts=watch.own_ttfts()))
                joined = EncodedFrame(self._others.join(own) if self._others and self._follows else own)
                self._whole = None
                for viewer in self._viewers:
                    viewer.give(mine if isinstance(viewer, Worker) else joined)
                self._follow_no_more()
                await asyncio.sleep(LARGE_INTERVAL_S if self._engines() > LARGE else INTERVAL_S)
        finally:
            self._is_producing = False  # set first, so that the next viewer starts another producer
            if self._watch is not None:
                self._watch.close()
            self._follow_no_more()
            for viewer in self._viewers:
                viewer.leave()
