"""The step-time profiles: an engine's properties, the times of its forward passes, and the speed of its KV transfers.

A profile is a JSON file with the source of its numbers. The step model has five terms, all in seconds. A step that
computes ``P`` prompt tokens and decodes ``B`` sequences takes

``linear(P + B) + pair * pairs + context * contexts + sequence * B + step``

where ``linear`` interpolates a table over tokens (matrix products, norms, all-reduce: for few tokens bound by reading
weights, after the last knot proportional), ``pairs`` is the number of (query, key) pairs of prefill attention, and
``contexts`` is the number of KV tokens that all decodes of the step read.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.aio.files import read_named
from tercet.protocol import BadRequest, KVLayout
from tercet.protocol.entry_points import import_extra


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a model's KV. ``kv_dtype_bytes`` is the size of one element of a key or value."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    kv_dtype: str
    kv_dtype_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV for one token, in all layers, over all ranks."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_dtype_bytes


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The terms of the step model, in seconds. ``knots`` are pairs ``(tokens, seconds)`` in rising order."""

    knots: tuple[tuple[int, float], ...]
    pair: float
    context: float
    sequence: float = 0.0
    step: float = 0.0


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The speed of KV transfers: bytes per second in each direction, and seconds from the last byte to the answer."""

    bytes_per_second: float
    latency: float


class HostSharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The factors by which a step takes longer while another engine of the same machine is busy.

    A step with prompt tokens is a prefill. ``prefill_beside_decode`` is the factor of a prefill while the other engine
    decodes. An engine that becomes idle lingers for ``linger`` seconds before it sleeps: for that time, vLLM's
    processes poll without a pause.
    """

    prefill_beside_prefill: float
    prefill_beside_decode: float
    decode_beside_prefill: float
    decode_beside_decode: float
    prefill_beside_linger: float = 1.0
    decode_beside_linger: float = 1.0
    linger: float = 0.0


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The source of a profile's numbers. ``fit_error`` is the fit's mean absolute relative error by kind of step."""

    source: str
    date: str
    command: str = ""
    fit_error: dict[str, float] = {}
    note: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The profile of one engine: a model on a device.

    ``call`` is the time from a verb's call to its arrival in the engine, ``router`` the time that a router adds to a
    request, both in seconds. ``sharing`` has the factors for engines that share a machine; None: not measured.
    """

    name: str
    model: ModelShape
    device: str
    tp_size: int
    block_size: int
    total_blocks: int
    max_model_len: int
    steps: StepTimes
    transfer: Transfer
    provenance: Provenance
    call: float = 0.0
    router: float = 0.0
    sharing: HostSharing | None = None

    def layout(self) -> KVLayout:
        """Return the KV layout. Engines exchange KV only if their layouts allow it."""
        model = self.model
        heads_per_rank = max(1, model.kv_heads // self.tp_size)
        return KVLayout(
            model=model.name,
            dtype=model.kv_dtype,
            num_layers=model.layers,
            num_kv_heads=model.kv_heads,
            head_size=model.head_size,
            block_size=self.block_size,
            block_bytes=2 * self.block_size * heads_per_rank * model.head_size * model.kv_dtype_bytes,
            tp_size=self.tp_size,
            packing="simulated",
            splits_by_head=True,
        )


class StepModel:
    """The step times of a profile, prepared for frequent use.

    ``decode_scale`` multiplies the decode part of a step: its time without its prompt tokens. ``prefill_scale``
    multiplies the rest. ``host_time`` (seconds) is added to every step.
    """

    def __init__(
        self, times: StepTimes, prefill_scale: float = 1.0, decode_scale: float = 1.0, host_time: float = 0.0
    ) -> None:
        self._times = times
        self._host_time = host_time
        self._prefill_scale = prefill_scale
        self._decode_scale = decode_scale
        self._tokens = [tokens for tokens, _ in times.knots]
        self._decode_base: dict[int, float] = {}
        self.per_context = times.context * decode_scale

    def linear(self, tokens: int) -> float:
        """Return the seconds of the parts that depend only on the number of tokens."""
        knots = self._times.knots
        if tokens <= 0:
            return 0.0
        if tokens <= knots[0][0]:
            return knots[0][1]
        index = min(bisect_right(self._tokens, tokens), len(knots) - 1)
        (low, at_low), (high, at_high) = knots[index - 1], knots[index]
        return at_low + (tokens - low) * (at_high - at_low) / (high - low)

    def decode_base(self, batch: int) -> float:
        """Return the seconds of a step that decodes ``batch`` sequences, without ``per_context`` for each KV token."""
        found = self._decode_base.get(batch)
        if found is None:
            times = self._times
            found = 0.0
            if batch:
                found = (self.linear(batch) + times.sequence * batch + times.step) * self._decode_scale
                found += self._host_time
            self._decode_base[batch] = found
        return found

    def step(self, tokens: int, pairs: float, batch: int, contexts: int) -> float:
        """Return the seconds of a step.

        It computes ``tokens`` prompt tokens with ``pairs`` pairs of attention, and decodes ``batch`` sequences with
        ``contexts`` KV tokens in total.
        """
        decode = self.decode_base(batch) + self.per_context * contexts if batch else self._host_time
        if not tokens:
            return decode
        times = self._times
        together = self.linear(tokens + batch) + times.sequence * batch + times.step
        without = (self.decode_base(batch) - self._host_time) / self._decode_scale if batch else 0.0
        return decode + (max(0.0, together - without) + times.pair * pairs) * self._prefill_scale


def pairs_of(begin: int, end: int) -> float:
    """Return the number of (query, key) pairs of causal attention for the positions ``[begin, end)``."""
    return (end - begin) * (begin + end + 1) / 2


def load_profile(name: str) -> Profile:
    """Return the shipped profile of this name, or the profile of a JSON file (a name that ends in ``.json``).

    Raise :class:`~tercet.protocol.BadRequest` if it does not exist or is invalid.
    """
    file = Path(name).expanduser()
    if name.endswith(".json"):
        try:
            content = read_named(file)
        except FileNotFoundError as error:
            raise BadRequest(f"profile: file {name} does not exist", "profile") from error
        except OSError as error:
            raise BadRequest(f"profile: {name} cannot be read: {error.strerror}", "profile") from error
        return parse_profile(content, name)
    shipped = shipped_profiles()
    if name not in shipped:
        raise BadRequest(f"profile: {name!r} does not exist; choose {', '.join(shipped)}, or a .json file", "profile")
    return parse_profile((_FOLDER / f"{name}.json").read_bytes(), name)


_FOLDER = resources.files("tercet_lab.sim") / "profiles"


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that Tercet ships."""
    return sorted(item.name.removesuffix(".json") for item in _FOLDER.iterdir() if item.name.endswith(".json"))


def parse_profile(data: bytes, name: str) -> Profile:
    """Return the checked profile from JSON. Raise :class:`~tercet.protocol.BadRequest`, which contains ``name``."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"profile: {name}: {error}", "profile") from error
    wrong = _first_wrong(profile)
    if wrong:
        raise BadRequest(f"profile: {name}: {wrong}", "profile")
    return profile


def _first_wrong(profile: Profile) -> str | None:
    for name in ("tp_size", "block_size", "total_blocks", "max_model_len"):
        if getattr(profile, name) < 1:
            return f"{name} is {getattr(profile, name)}, and must be at least 1"
    steps = profile.steps
    for name in ("pair", "context", "sequence", "step"):
        if not getattr(steps, name) >= 0:
            return f"steps.{name} is {getattr(steps, name)}, and must not be negative"
    if len(steps.knots) < 2:
        return "steps.knots needs at least two points"
    rising = zip(steps.knots, steps.knots[1:], strict=False)
    if steps.knots[0][0] < 1 or steps.knots[0][1] <= 0 or any(a[0] >= b[0] or a[1] > b[1] for a, b in rising):
        return "steps.knots must rise in tokens, start at 1 or more, and never fall in seconds"
    if profile.transfer.bytes_per_second <= 0 or profile.transfer.latency < 0:
        return "transfer.bytes_per_second must be positive, transfer.latency not negative"
    if not (profile.call >= 0 and profile.router >= 0):
        return "call and router must not be negative"
    for name, factor in msgspec.structs.asdict(profile.sharing).items() if profile.sharing else ():
        least = 0 if name == "linger" else 1
        if not least <= factor < math.inf:
            return f"sharing.{name} is {factor}, and must be at least {least}"
    return None


Floats = NDArray[np.float64]


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that computed ``tokens`` prompt tokens after ``cached`` cached tokens, in ``seconds``."""

    tokens: int
    cached: int
    seconds: float


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that decoded ``batch`` sequences with ``context`` KV tokens each, in ``seconds``."""

    batch: int
    context: int
    seconds: float


def fit_steps(
    prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint], knots: Sequence[int]
) -> tuple[StepTimes, dict[str, float]]:
    """Return the terms that fit best, and the mean absolute relative error by kind of step.

    ``knots`` are token counts in rising order; the linear part is interpolated between them. Raise
    :class:`~tercet.protocol.BadRequest` if the points cannot determine the terms.
    """
    points, terms = len(prefills) + len(decodes), len(knots) + 3
    if points < terms or len(knots) < 2 or not decodes or not prefills:
        raise BadRequest(f"points: {points} of both kinds cannot determine {terms} terms; measure more", "points")
    rows = [_row(knots, p.tokens, pairs_of(p.cached, p.cached + p.tokens), 0, 0) for p in prefills]
    rows += [_row(knots, d.batch, 0, d.batch * (d.context + 1), d.batch) for d in decodes]
    seconds = np.array([point.seconds for point in (*prefills, *decodes)])
    if not (seconds > 0).all():
        raise BadRequest("points: every step must take more than 0 seconds", "points")
    found = non_negative_least_squares(np.array(rows) / seconds[:, None], np.ones(len(seconds)))
    linear, (pair, context, sequence) = np.cumsum(found[: len(knots)]), (float(value) for value in found[len(knots) :])
    table = tuple((int(knot), float(value)) for knot, value in zip(knots, linear, strict=True))
    times = StepTimes(knots=table, pair=pair, context=context, sequence=sequence)
    return times, errors_of(times, prefills, decodes)


def errors_of(times: StepTimes, prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint]) -> dict[str, float]:
    """Return the mean absolute relative error of the model on points, by kind of step."""
    model = StepModel(times)
    prefill = [model.step(p.tokens, pairs_of(p.cached, p.cached + p.tokens), 0, 0) / p.seconds for p in prefills]
    decode = [model.step(0, 0, d.batch, d.batch * (d.context + 1)) / d.seconds for d in decodes]
    kinds = {"prefill": prefill, "decode": decode}
    return {kind: round(float(np.mean(np.abs(np.array(ratios) - 1))), 4) for kind, ratios in kinds.items()}


def _row(knots: Sequence[int], tokens: int, pairs: float, contexts: float, sequences: float) -> list[float]:
    """Return the coefficients of one point.

    They belong to the value at the first knot, to the rise to each next knot, and to the three other terms.
    """
    rises = [1.0]
    for index, (low, high) in enumerate(pairwise(knots)):
        share = (tokens - low) / (high - low)
        # After the last knot, the last slope continues.
        rises.append(max(0.0, share if index == len(knots) - 2 else min(share, 1.0)))
    return [*rises, pairs, contexts, sequences]


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the ``x >= 0`` that minimizes ``|matrix @ x - target|``."""
    nnls = import_extra("scipy.optimize", "fitting a profile").nnls

    # Columns differ by ten orders of magnitude, so one tolerance does not suit them all: scale them.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    found, _residual = cast("tuple[Floats, float]", nnls(matrix / scale, target))
    return found / scale


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
        self.before_change: Callable[[], None] | None = None  # called before each change of the speed

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
        if self.before_change is not None:
            self.before_change()
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
        why = "has no data on engines that share a host; measure one with two --engine of the same host"
        raise BadRequest(f"host: profile {profile.name} {why}", "host")
    return host.join(profile.sharing)
