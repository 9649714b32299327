"""Time on a machine that several engines share: while they compute together, each one's steps take longer.

An engine's core has its own time, in which a step takes as long as on an idle machine. For a lone engine that is the
loop's time. On a shared :class:`Host` it runs slower while others compute: a second of it takes ``1 + sum(factor - 1)``
seconds, summed over the other engines that compute; a factor tells how much longer a kind of step takes next to one
engine that runs another kind of step. The speed changes when an engine begins or ends to compute, so a step that
overlaps with another for a part of its time is slowed for that part only. Engines that have just computed may linger,
and slow the others for a while longer.

With two engines the sum is what was measured; with more it is an assumption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tercet.lab.sim.step_times import HostSharing, Profile
from tercet.protocol import BadRequest

Kind = Literal["prefill", "decode"]
"""What an engine computes: steps with prompt tokens (and perhaps decodes), or steps of decodes only."""
State = Literal["prefill", "decode", "linger"]


class LoopTime:
    """The time of an engine that has its machine to itself: the loop's, in seconds."""

    __slots__ = ("call_at", "time")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # The loop's own methods: a thousand engines without a host pay nothing for one.
        self.time = loop.time
        self.call_at = loop.call_at

    on_loop = staticmethod(float)
    """Convert to the loop's time, if no engine begins or ends to compute until then: here, the same number."""

    def compute(self, kind: Kind | None) -> None:
        """Record that another kind of step is computed from now on, or nothing."""

    def end(self) -> None:
        """Record that the engine is gone, and computes nothing."""


class Host:
    """A machine, and the engines on it."""

    def __init__(self) -> None:
        self._times: list[SharedTime] = []
        self._engines: dict[State, int] = dict.fromkeys(get_args(State), 0)

    def join(self, sharing: HostSharing) -> SharedTime:
        """Return the time of one more engine, which slows down according to ``sharing``."""
        time = SharedTime(self, sharing)
        self._times.append(time)
        return time

    def change(self, before: State | None, after: State | None) -> None:
        """Count an engine's change of state, and let all engines run at their new speeds."""
        if before is not None:
            self._engines[before] -= 1
        if after is not None:
            self._engines[after] += 1
        for time in self._times:
            time.adapt(self._engines)


class SharedTime:
    """The time of one engine of a host, with the methods of :class:`LoopTime`; it has one alarm at most."""

    def __init__(self, host: Host, sharing: HostSharing) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._beside: dict[State | None, dict[State, float]] = {
            kind: {state: getattr(sharing, f"{kind}_beside_{state}") - 1 for state in get_args(State)}
            for kind in get_args(Kind)
        }
        self._linger = sharing.linger
        self._state: State | None = None
        self._sleep: asyncio.TimerHandle | None = None
        self._slowdown = 1.0
        # The two times advance from here on at the present speed.
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
        """Set the speed for these numbers of engines, this one included, in each state."""
        slowdown = self._slowdown_beside(engines)
        if slowdown == self._slowdown:
            return
        self._since, self._since_on_loop = self.time(), self._loop.time()
        self._slowdown = slowdown
        alarm = self._alarm
        if alarm is not None and alarm.pending:
            alarm.handle.cancel()
            alarm.handle = self._loop.call_at(self.on_loop(alarm.when), alarm.ring)

    def _slowdown_beside(self, engines: Mapping[State, int]) -> float:
        own, beside = self._state, self._beside.get(self._state)
        if beside is None:
            return 1.0
        return 1.0 + sum(more * (engines[state] - (state == own)) for state, more in beside.items())


@dataclass(eq=False, slots=True)
class _Alarm:
    """A callback at a moment of a shared time, whose moment on the loop changes."""

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
    """The time of an engine, which may share a host.

    Raises :class:`~tercet.protocol.BadRequest` if its profile has no data on sharing.
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
