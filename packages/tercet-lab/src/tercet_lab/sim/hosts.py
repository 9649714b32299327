"""Time on a machine that several engines share: while they compute at the same time, the steps of each take longer.

An engine's core has its own time, in which a step takes as long as on an idle machine. For the only engine of a machine
that is the loop's time. On a shared :class:`Host` it runs slower while other engines compute: one second of it takes
``1 + sum(factor - 1)`` seconds, summed over the other engines that compute. A factor says how much longer a step of
one kind takes while one other engine runs a step of another kind. The speed changes when an engine starts or stops
computing, so a step that overlaps partly with another step is slowed for that part only. An engine that has stopped
computing may linger, and slow the other engines for that time too.

For two engines the sum was measured; for more engines it is an assumption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tercet.protocol import BadRequest
from tercet_lab.sim.step_times import HostSharing, Profile

Kind = Literal["prefill", "decode"]
"""The kind of an engine's steps: ``prefill`` has prompt tokens, and perhaps decodes; ``decode`` has decodes only."""
State = Literal["prefill", "decode", "linger"]


class LoopTime:
    """The time of an engine that does not share its machine: the loop's time, in seconds."""

    __slots__ = ("call_at", "time")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # The loop's methods themselves, so that engines without a shared host have no overhead.
        self.time = loop.time
        self.call_at = loop.call_at

    on_loop = staticmethod(float)
    """Convert a time to the loop's time: here, the same number. A shared host assumes that its speed stays the same."""

    def compute(self, kind: Kind | None) -> None:
        """Record the kind of step that the engine computes from now on; None if it computes nothing."""

    def end(self) -> None:
        """Record that the engine has ended, and computes nothing."""


class Host:
    """A machine with the engines on it."""

    def __init__(self) -> None:
        self._times: list[SharedTime] = []
        self._engines: dict[State, int] = dict.fromkeys(get_args(State), 0)

    def join(self, sharing: HostSharing) -> SharedTime:
        """Add an engine, and return its time, which slows down according to ``sharing``."""
        time = SharedTime(self, sharing)
        self._times.append(time)
        return time

    def change(self, before: State | None, after: State | None) -> None:
        """Count an engine's change of state, and update the speed of all engines."""
        if before is not None:
            self._engines[before] -= 1
        if after is not None:
            self._engines[after] += 1
        for time in self._times:
            time.adapt(self._engines)


class SharedTime:
    """The time of one engine on a shared host, with the methods of :class:`LoopTime`; it has one pending callback."""

    def __init__(self, host: Host, sharing: HostSharing) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._added: dict[State | None, dict[State, float]] = {
            kind: {state: getattr(sharing, f"{kind}_beside_{state}") - 1 for state in get_args(State)}
            for kind in get_args(Kind)
        }
        self._linger = sharing.linger
        self._state: State | None = None
        self._sleep: asyncio.TimerHandle | None = None
        self._slowdown = 1.0
        # Engine time and loop time at the last change of speed.
        self._since = self._since_on_loop = self._loop.time()
        self._alarm: _Alarm | None = None

    def time(self) -> float:
        return self._since + (self._loop.time() - self._since_on_loop) / self._slowdown

    def on_loop(self, when: float) -> float:
        return self._since_on_loop + (when - self._since) * self._slowdown

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> _Alarm:
        self._alarm = _Alarm(when, callback, args)
        self._alarm.handle = self._loop.call_at(self.on_loop(when), self._alarm.ring)
        return self._alarm

    def compute(self, kind: Kind | None) -> None:
        if kind is not None:
            self._turn(kind)
        elif self._state in ("prefill", "decode"):
            if self._linger:
                self._turn("linger")
                self._sleep = self._loop.call_later(self._linger, self._turn, None)
            else:
                self._turn(None)

    def end(self) -> None:
        self._turn(None)

    def _turn(self, state: State | None) -> None:
        if state == self._state:
            return
        if self._sleep is not None:
            self._sleep.cancel()
            self._sleep = None
        before, self._state = self._state, state
        self._host.change(before, state)

    def adapt(self, engines: Mapping[State, int]) -> None:
        """Set the speed. ``engines`` is the number of engines in each state, this one included."""
        slowdown = self._slowdown_by(engines)
        if slowdown == self._slowdown:
            return
        self._since, self._since_on_loop = self.time(), self._loop.time()
        self._slowdown = slowdown
        alarm = self._alarm
        if alarm is not None and alarm.pending:
            alarm.handle.cancel()
            alarm.handle = self._loop.call_at(self.on_loop(alarm.when), alarm.ring)

    def _slowdown_by(self, engines: Mapping[State, int]) -> float:
        own, added = self._state, self._added.get(self._state)
        if added is None:
            return 1.0
        return 1.0 + sum(more * (engines[state] - (state == own)) for state, more in added.items())


@dataclass(eq=False, slots=True)
class _Alarm:
    """A callback at a fixed moment of a shared time; its moment on the loop changes with the speed."""

    when: float
    callback: Callable[..., object]
    args: tuple[Any, ...]
    handle: asyncio.TimerHandle = field(init=False)
    pending: bool = True

    def ring(self) -> None:
        self.pending = False
        self.callback(*self.args)

    def cancel(self) -> None:
        self.pending = False
        self.handle.cancel()


EngineTime = LoopTime | SharedTime
Alarm = asyncio.TimerHandle | _Alarm


def time_on(host: Host | None, profile: Profile) -> EngineTime:
    """Return the time of an engine on ``host`` (None: it does not share a machine).

    Raise :class:`~tercet.protocol.BadRequest` if its profile has no data on sharing.
    """
    if host is None:
        return LoopTime()
    if profile.sharing is None:
        raise BadRequest(
            f"host: profile {profile.name} has no data on engines that share a host; measure one with "
            "two --engine of the same host",
            "host",
        )
    return host.join(profile.sharing)
