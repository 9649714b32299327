"""The records that the page draws, from a router's stream or from the file of a simulated run.

A :class:`Frame` has the changes since the previous frame; a ``whole`` frame has all data. Times are in seconds: Unix
times of a router, virtual times of a simulation.
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
    """Engines of one role that are not drawn: their number, the mean KV usage (thousandths), and sums."""

    role: str
    engines: int
    kv: int
    running: int
    waiting: int
    dead: int


class ProgramPoint(NamedTuple):
    """Counts of a program since the previous point: requests done and unfinished, tokens, medians, 90th percentiles.

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
    """One point of the charts, ``seconds`` after the previous one; ``running`` and ``waiting`` are engines' sums."""

    t: float
    seconds: float
    running: int
    waiting: int
    programs: dict[str, ProgramPoint]


class EngineTTFT(NamedTuple):
    """An engine, the number of requests that spent most of their TTFT there, and the sum of TTFTs in seconds."""

    engine: str
    requests: int
    seconds: float


class LaneStart(NamedTuple):
    """The start of a request that is drawn; ``lane`` is its number on the page, ``seq_id`` is empty for clients."""

    lane: int
    t: float
    program: str
    prompt: int
    seq_id: str


class LaneSpan(NamedTuple):
    """A verb, a move, a retry or a fallback of a drawn request, from ``begin`` to ``end``, with the trace's counts."""

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
    """The end of a drawn request; ``done`` is true if its client got the whole answer. Latencies are in ms."""

    lane: int
    t: float
    done: bool
    tokens: int
    ttft: float | None
    tpot: float | None


class MoveShown(msgspec.Struct, frozen=True, omit_defaults=True):
    """A move of a running sequence; a later record with the same number replaces it. Times are in seconds."""

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
    """The service that is shown. Objectives are in milliseconds; ``returned`` is why programs were rolled back."""

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
    """The changes until ``t``. ``engines`` is the whole list if it changed; then ``loads`` has all rows.

    A row of ``loads`` has an engine's place in the last list, its KV usage (thousandths), its running and waiting
    requests, the time of its last steps (microseconds), the sequences of this router there, the mean time to first
    token (milliseconds) of requests that spent most of it there, and its state: a sum of :data:`DEAD` and the other
    states. A time of 0 means unknown. ``ttfts`` are for other workers only.
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
    """Return the frame without ids of requests and texts of errors, which belong to other clients."""
    return msgspec.structs.replace(
        frame,
        lanes=[start._replace(seq_id="") for start in frame.lanes],
        spans=[span._replace(said="") for span in frame.spans],
        moves=[msgspec.structs.replace(move, seq_id="", error="") for move in frame.moves],
    )


def merged(first: Frame, second: Frame) -> Frame:
    """Return one frame with the changes of ``first`` and then ``second``."""
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
    """Return half as many frames with the same result: pairs are merged, and an odd last frame stays."""
    pairs = zip(frames[::2], frames[1::2], strict=False)
    return list(chain((merged(*pair) for pair in pairs), frames[len(frames) // 2 * 2 :]))


def encoded(frames: Iterable[Frame]) -> bytes:
    """Return frames as server-sent events."""
    return b"".join(b"data: " + msgspec.json.encode(frame) + b"\n\n" for frame in frames)
