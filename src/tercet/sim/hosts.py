"""Time on a machine that several engines share: while they compute at once, each one's steps take longer.

An engine's core keeps its own time, in which a step takes as long as on an idle machine. For a lone engine that is the
loop's time. On a shared :class:`Host` it runs slower while others compute: a second of it takes ``1 + sum(factor - 1)``
seconds, summed over the other engines that compute, where a factor says how much longer a kind of step takes beside one
engine that runs another kind of step. The time changes its speed when somebody begins or ends to compute, so a step
that runs beside another for a part of its time is slowed for that part alone.

With two engines the sum is what was measured; with more it is an assumption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol

from tercet.sim.profile import Sharing

Kind = Literal["prefill", "decode"]
"""What an engine computes: steps with prompt tokens, whatever else is in them, or steps of decodes alone."""


class Alarm(Protocol):
    """A callback that is due."""

    def cancel(self) -> None:
        """Let it never run."""
        ...


class EngineTime(Protocol):
    """One engine's own time; it has one alarm at most."""

    def time(self) -> float:
        """Now, in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Alarm:
        """Run a callback at ``when`` of this time."""
        ...

    def on_loop(self, when: float) -> float:
        """When that is in the loop's time, if nobody begins or ends to compute until then."""
        ...

    def compute(self, kind: Kind | None) -> None:
        """What is computed from now on; None is nothing."""
        ...


class LoopTime:
    """The time of an engine that has its machine to itself."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # The loop's own methods: a thousand engines pay nothing for a host that they do not have.
        self.time = loop.time
        self.call_at = loop.call_at

    def on_loop(self, when: float) -> float:
        """See :meth:`EngineTime.on_loop`."""
        return when

    def compute(self, kind: Kind | None) -> None:
        """See :meth:`EngineTime.compute`."""


class Host:
    """A machine, and the engines on it."""

    def __init__(self) -> None:
        self._times: list[SharedTime] = []
        self._computing: dict[Kind, int] = {"prefill": 0, "decode": 0}

    def join(self, sharing: Sharing) -> SharedTime:
        """The time of one more engine, which slows down as ``sharing`` says."""
        time = SharedTime(self, sharing)
        self._times.append(time)
        return time

    def change(self, before: Kind | None, after: Kind | None) -> None:
        """Count an engine that changed what it computes, and let all of them run at their new speeds."""
        if before is not None:
            self._computing[before] -= 1
        if after is not None:
            self._computing[after] += 1
        for time in self._times:
            time.adapt(self._computing["prefill"], self._computing["decode"])


class SharedTime:
    """The time of one engine of a host."""

    def __init__(self, host: Host, sharing: Sharing) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._beside: dict[Kind, tuple[float, float]] = {
            "prefill": (sharing.prefill_beside_prefill - 1, sharing.prefill_beside_decode - 1),
            "decode": (sharing.decode_beside_prefill - 1, sharing.decode_beside_decode - 1),
        }
        self._kind: Kind | None = None
        self._slowdown = 1.0
        # The two times ran from here on at the present speed.
        self._since = self._since_on_loop = self._loop.time()
        self._alarm: _Alarm | None = None

    def time(self) -> float:
        """See :meth:`EngineTime.time`."""
        return self._since + (self._loop.time() - self._since_on_loop) / self._slowdown

    def on_loop(self, when: float) -> float:
        """See :meth:`EngineTime.on_loop`."""
        return self._since_on_loop + (when - self._since) * self._slowdown

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Alarm:
        """See :meth:`EngineTime.call_at`."""
        self._alarm = _Alarm(when, callback, args)
        self._alarm.handle = self._loop.call_at(self.on_loop(when), self._alarm.ring)
        return self._alarm

    def compute(self, kind: Kind | None) -> None:
        """See :meth:`EngineTime.compute`."""
        if kind != self._kind:
            before, self._kind = self._kind, kind
            self._host.change(before, kind)

    def adapt(self, prefills: int, decodes: int) -> None:
        """Run at the speed that is left while so many engines, this one included, compute."""
        slowdown = self._slowdown_beside(prefills, decodes)
        if slowdown == self._slowdown:
            return
        self._since, self._since_on_loop = self.time(), self._loop.time()
        self._slowdown = slowdown
        alarm = self._alarm
        if alarm is not None and alarm.pending:
            alarm.handle.cancel()
            alarm.handle = self._loop.call_at(self.on_loop(alarm.when), alarm.ring)

    def _slowdown_beside(self, prefills: int, decodes: int) -> float:
        if self._kind is None:
            return 1.0
        beside_prefill, beside_decode = self._beside[self._kind]
        prefills -= self._kind == "prefill"
        decodes -= self._kind == "decode"
        return 1.0 + prefills * beside_prefill + decodes * beside_decode


class _Alarm:
    """A callback at a moment of a shared time, whose moment on the loop moves."""

    __slots__ = ("_args", "_callback", "handle", "pending", "when")

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.when = when
        self.pending = True
        self.handle: asyncio.TimerHandle
        self._callback = callback
        self._args = args

    def ring(self) -> None:
        self.pending = False
        self._callback(*self._args)

    def cancel(self) -> None:
        self.pending = False
        self.handle.cancel()
