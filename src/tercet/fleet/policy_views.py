"""The views of a fleet that policies use: for roles, for moves, and the requests of the last minutes for planners.

Planners get times, lengths and hashes of blocks, and no text.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from tercet.decisions.cost.engine_work import UNKNOWN_CONTEXT
from tercet.decisions.migration import CountedMove, LoadedEngine, SequenceView
from tercet.decisions.objectives import meets
from tercet.decisions.planning import ObservedEngine, ObservedRequest
from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.fleet_view import Trace
from tercet.fleet.members import Member
from tercet.fleet.sequences import RunningSequence
from tercet.settings.fleet_settings import Objectives

BLOCK, USUAL_TPOT_S = 512, 0.02
"""Tokens per block in the comparison of prompts' beginnings; and seconds per token before an answer has ended."""
MOST_SEEN, MOST_BLOCKS = 50_000, 1_000_000
"""Largest numbers of kept requests and of their blocks, 36 bytes each; beyond them the oldest requests are dropped."""


class PrefillLine(NamedTuple):
    """Prefills of one engine, as routers count them, in seconds; and the sequences that they leave out."""

    waiting_s: float = 0.0  # the estimated wait of a new request
    busy_s: float = 0.0  # for how long, since the engine was first seen, prefills ran or waited there
    background: int = 0


def prefill_line(fleet: EngineFleet, member: Member) -> PrefillLine:
    """Return the prefills of this process on an engine."""
    now, work = fleet.costs.clock(), fleet.costs.work(member.name)
    return PrefillLine(work.waiting(now), work.busy(now), member.background)


def observed_engines(fleet: EngineFleet, lines: Mapping[str, PrefillLine] | None = None) -> list[ObservedEngine]:
    """Return every engine, no store, with its clients' load; ``lines`` are of all processes, None for this one."""
    observed = list[ObservedEngine]()
    for member in fleet.members:
        role = member.role
        if role == "store":
            continue
        able = member.reachable and not member.leaving and not member.refused
        line = (lines or {}).get(member.name) or prefill_line(fleet, member)
        engine = ObservedEngine(member.name, role, able, line.waiting_s, line.busy_s)
        if (last := fleet.knowledge.loads.last(member.name)) is not None:
            load, _ = last
            of_clients = 1 - min(1.0, line.background / max(1, load.running + load.waiting))
            running, usage = round(load.running * of_clients), load.kv_usage * of_clients
            # Sequences whose prompts still wait on other engines have reserved KV here, which no step reads.
            share = load.running / max(load.running, member.in_flight, 1)
            contexts = int(usage * member.kv_tokens * share) or running * UNKNOWN_CONTEXT
            engine = replace(engine, running=running, queued=round(load.waiting * of_clients), contexts=contexts,
                             step_s=load.step_time, kv_usage=usage)  # fmt: skip
        observed.append(engine)
    return observed


def is_stale(fleet: EngineFleet, member: Member, stale_after_s: float) -> bool:
    """True if a reachable engine has made no progress for ``stale_after_s`` seconds.

    A lost engine is not stale: its sequences have left it.
    """
    return member.reachable and fleet.liveness.stalled_s(member.name) > stale_after_s


def counted_move(fleet: EngineFleet, source: str, destination: str, tokens: int) -> CountedMove:
    """Return a move of ``tokens`` in the form that limits count.

    Raises :class:`~tercet.protocol.UnknownEngine` for an unknown destination.
    """
    last = fleet.knowledge.loads.last(destination)
    usage = last[0].kv_usage if last is not None else None
    return CountedMove(source, destination, tokens, fleet.member(destination).share(tokens), usage)


def loaded_engines(
    fleet: EngineFleet, sequences: Mapping[str, Sequence[SequenceView]], moves: Iterable[CountedMove],
    stale_after_s: float,
) -> list[LoadedEngine]:  # fmt: skip
    """Return all engines, with loads after all ``moves``; KV of the background is load, as moves need room at once."""
    members, engines = {member.name: member for member in fleet.members}, dict[str, LoadedEngine]()
    for name, member in members.items():
        last = fleet.knowledge.loads.last(name)
        load, waiting = (last[0].kv_usage, last[0].waiting) if last is not None else (None, 0)
        stale = is_stale(fleet, member, stale_after_s)
        engines[name] = LoadedEngine(
            name, member.role, load, sequences.get(name, ()), member.leaving, member.reachable, stale, waiting,
            member.revision,
        )  # fmt: skip
    for move in moves:
        for name, sign in ((move.source, -1), (move.destination, 1)):
            if name in engines:
                engines[name].arriving += sign * members[name].share(move.tokens)
    return list(engines.values())


# ---- requests --------------------------------------------------------------------------------------------------------


def block_names(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return a hash for each whole block, equal for equal beginnings; it does not reveal the tokens."""
    names, before = list[int](), 0
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        before = hash((before, tuple(prompt[begin : begin + BLOCK])))
        names.append(before)
    return tuple(names)


class SeenRequest:
    """One request, while it runs and after its end."""

    __slots__ = ("_sequence", "at", "blocks", "ended", "met", "output_tokens", "prompt_tokens")

    def __init__(self, sequence: RunningSequence, now: float, named: bool = True) -> None:
        self.at = now
        self.prompt_tokens = sequence.request.num_tokens
        self.blocks = block_names(sequence.request.prompt) if named else ()
        self.output_tokens = 0
        self.ended = False
        self.met: bool | None = None
        self._sequence: RunningSequence | None = sequence

    def end(self, met: bool | None) -> None:
        sequence, self._sequence = self._sequence, None
        self.output_tokens = len(sequence.tokens) if sequence is not None else 0
        self.ended, self.met = True, met

    def as_arrival(self, now: float, tpot: float) -> ObservedRequest:
        """Return the request in the form that planners get.

        A running stream may hand its tokens over only at its end: it counts as having one token each ``tpot`` seconds.
        """
        tokens, sequence = self.output_tokens, self._sequence
        if sequence is not None and sequence.ttft is not None:
            tokens = max(len(sequence.tokens), 1 + int((now - sequence.began - sequence.ttft) / tpot))
        return ObservedRequest(self.at, self.prompt_tokens, tokens, self.ended, self.blocks, BLOCK, self.met)


class SeenRequests:
    """The requests of the last ``window_s`` seconds of one process: an observer of the service's sequences.

    Those in the background are left out: they wait until others leave them a step. Without ``named``, blocks have no
    names, which cost time.
    """

    def __init__(self, window_s: float, objectives: Objectives, clock: Callable[[], float], named: bool = True) -> None:
        self.objectives = objectives
        self.since = clock()  # the fleet's clock, in seconds
        self.arrived = self.ended = self.met = 0  # requests since then
        self._window_s, self._clock, self._named = window_s, clock, named
        self._running: dict[RunningSequence, SeenRequest] = {}
        self._seen: deque[SeenRequest] = deque()
        self._blocks = 0
        self._tpot = USUAL_TPOT_S

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        if sequence.request.background:
            return
        now = self._clock()
        self._forget(now)
        found = self._running[sequence] = SeenRequest(sequence, now, self._named)
        # Kept in the order of arrival, so that those beyond the window are at the front.
        self._seen.append(found)
        self._blocks += len(found.blocks)
        while len(self._seen) > MOST_SEEN or self._blocks > MOST_BLOCKS:
            self._drop_oldest()
        self.arrived += 1

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Literal["served", "failed", "left"]) -> None:
        """Record the end of a request; a request that arrived before this object existed is ignored."""
        found = self._running.pop(sequence, None)
        if found is None:
            return
        met = None if outcome == "left" else outcome == "served" and meets(self.objectives, trace.ttft, trace.tpot)
        found.end(met)
        # A client that left says nothing about objectives.
        if met is not None:
            self.ended += 1
            self.met += met
        if outcome == "served" and found.output_tokens > 1:
            seconds = (self._clock() - found.at) / found.output_tokens
            self._tpot += 0.01 * (seconds - self._tpot)

    def arrivals(self, now: float, newest_s: float = math.inf) -> tuple[ObservedRequest, ...]:
        """Return the requests of the last ``newest_s`` seconds within the window, in the order of their arrival."""
        self._forget(now)
        newest = list(itertools.takewhile(lambda each: now - each.at <= newest_s, reversed(self._seen)))
        return tuple(each.as_arrival(now, self._tpot) for each in reversed(newest))

    def _forget(self, now: float) -> None:
        while self._seen and now - self._seen[0].at > self._window_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._blocks -= len(self._seen.popleft().blocks)
