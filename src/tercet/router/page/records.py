"""The records that the page draws: the same from a router's stream and from a file of a simulated run.

A :class:`Frame` has what changed since the frame before it; a ``whole`` one has everything. Times are seconds:
Unix times of a router, virtual ones of a simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

# States of an engine, as bits of a number.
DEAD, DRAINING, STOPPING, REFUSED, SILENT = 1, 2, 4, 8, 16


class Seat(NamedTuple):
    """An engine's place in the fleet map."""

    name: str
    role: str


class Unseen(msgspec.Struct, frozen=True):
    """Engines of one role that are too many to draw: how many, the mean KV fill (thousandths), and sums."""

    role: str
    engines: int
    kv: int
    running: int
    waiting: int
    dead: int


class ProgramPoint(NamedTuple):
    """What a program did since the point before: requests done and unfinished, tokens; medians and 90th percentiles.

    Times are milliseconds, None without a request.
    """

    done: int
    unfinished: int
    tokens: int
    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p50: float | None
    tpot_p90: float | None


class FleetPoint(msgspec.Struct, frozen=True):
    """One moment of the charts; ``seconds`` since the one before. ``running`` and ``waiting`` are sums of engines."""

    t: float
    seconds: float
    running: int
    waiting: int
    programs: dict[str, ProgramPoint]


class EngineTTFT(NamedTuple):
    """An engine, and how many requests spent most of their TTFT there, with its sum in seconds."""

    engine: str
    requests: int
    seconds: float


class LaneStart(NamedTuple):
    """A request that is drawn begins; ``lane`` is its number on the page, ``seq_id`` is empty for clients."""

    lane: int
    t: float
    program: str
    prompt: int
    seq_id: str


class LaneSpan(NamedTuple):
    """A verb, a move, a retry or a fallback of that request, from ``begin`` to ``end``; counts are as in the trace."""

    lane: int
    verb: str
    engine: str
    begin: float
    end: float
    to: str
    tokens: int
    cached: int
    bytes: int
    chunks: int
    said: str


class LaneEnd(NamedTuple):
    """That request is over. ``done``: its client got all of it; times in milliseconds."""

    lane: int
    t: float
    done: bool
    tokens: int
    ttft: float | None
    tpot: float | None


class MoveShown(msgspec.Struct, frozen=True, omit_defaults=True):
    """A move of a running sequence; the last record with its number counts. ``pause`` and ``seconds`` are seconds."""

    number: int
    t: float
    source: str
    to: str
    reason: str
    outcome: str
    tokens: int
    seconds: float = 0.0
    bytes: int = 0
    stages: int = 0
    pause: float | None = None
    seq_id: str = ""
    error: str = ""


class ShareShown(msgspec.Struct, frozen=True):
    """One program of a split."""

    name: str
    program: str
    weight: float


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is watched. ``objectives`` are milliseconds, ``returned`` says why a version of programs was given up."""

    model: str
    version: int
    shares: tuple[ShareShown, ...]
    rules: int = 0
    sticky: str = ""
    roles: str = "fixed"
    why: str = ""
    returned: str = ""
    ttft_objective: float | None = None
    tpot_objective: float | None = None
    process: int = 0
    workers: int = 1


class Frame(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What changed until ``t``. ``engines`` is the whole list, whenever it changed; all rows of loads follow then.

    A row of ``loads`` has an engine's place in the last list, its KV fill (thousandths), the running and the waiting
    requests, the time of its last steps (microseconds), the sequences of this router there, the mean time to first
    token (milliseconds) of the requests that spent most of it there, and its state: a sum of :data:`DEAD` and its like.
    A time of 0 is not known. ``ttfts`` are for other workers alone.
    """

    t: float
    whole: bool = False
    about: About | None = None
    engines: Sequence[Seat] | None = None
    loads: Sequence[Sequence[int]] = ()
    unseen: Sequence[Unseen] = ()
    points: Sequence[FleetPoint] = ()
    lanes: Sequence[LaneStart] = ()
    spans: Sequence[LaneSpan] = ()
    ends: Sequence[LaneEnd] = ()
    moves: Sequence[MoveShown] = ()
    ttfts: Sequence[EngineTTFT] = ()


def for_clients(frame: Frame) -> Frame:
    """The frame without what other clients called their requests, and without words of errors."""
    return msgspec.structs.replace(
        frame,
        lanes=[start._replace(seq_id="") for start in frame.lanes],
        spans=[span._replace(said="") for span in frame.spans],
        moves=[msgspec.structs.replace(move, seq_id="", error="") for move in frame.moves],
    )


def merged(first: Frame, second: Frame) -> Frame:
    """One frame that does what both do, one after the other."""
    if second.whole:
        return second
    rows = {} if second.engines is not None else {row[0]: row for row in first.loads}
    rows |= {row[0]: row for row in second.loads}
    moves = {move.number: move for move in (*first.moves, *second.moves)}
    return Frame(
        t=second.t, whole=first.whole, about=second.about or first.about, engines=second.engines or first.engines,
        loads=[rows[index] for index in sorted(rows)], unseen=second.unseen, points=[*first.points, *second.points],
        lanes=[*first.lanes, *second.lanes], spans=[*first.spans, *second.spans], ends=[*first.ends, *second.ends],
        moves=[moves[number] for number in sorted(moves)],
    )  # fmt: skip


def halved(frames: Sequence[Frame]) -> list[Frame]:
    """Half as many frames, that end with the same picture; an odd last one stays alone."""
    pairs = zip(frames[::2], frames[1::2], strict=False)
    return list(chain((merged(*pair) for pair in pairs), frames[len(frames) // 2 * 2 :]))


def encoded(frames: Iterable[Frame]) -> bytes:
    """Frames as events of a stream."""
    return b"".join(b"data: " + msgspec.json.encode(frame) + b"\n\n" for frame in frames)
