"""The workloads of ``tercet bench`` for simulated engines. The same text gives the same plan of requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from tercet.protocol import BadRequest, Request
from tercet_lab.bench.arrivals import replayed
from tercet_lab.bench.simulated.scenario import gaps_of
from tercet_lab.bench.workloads import Conversation, parse_phases, plan
from tercet_lab.bench.workloads.hashed_words import HashedWords

WORDS = HashedWords()
# Suffix of the names of later turns, one for each turn.
LATER = "+"


class PlannedWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A workload in text form, one text per phase (:func:`tercet_lab.bench.workloads.parse_phase`).

    ``requests`` is their number; None means all of a trace. ``rate`` is in requests per second: after a conversation of
    n requests, the next one begins n gaps later. ``arrivals`` are those of
    :class:`~tercet_lab.bench.simulated.SyntheticWorkload`, or ``trace``: the times of the trace, scaled to the rate
    unless it is None. The first ``warm_up`` conversations are in no metric.
    """

    workload: tuple[str, ...]
    rate: float | None = None
    requests: int | None = None
    arrivals: Literal["poisson", "constant", "gamma", "trace"] = "poisson"
    burstiness: float = 1.0
    warm_up: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        _require(
            self.finite or self.arrivals != "trace", "arrivals", "trace needs exactly one workload, a recorded trace"
        )
        _require(self.rate is not None or self.arrivals == "trace", "rate", "is missing; give requests per second")
        _require(self.rate is None or self.rate > 0, "rate", "must be positive")
        _require(self.burstiness > 0, "burstiness", "must be positive")
        _require(
            self.requests is None or self.requests > self.warm_up >= 0,
            "warm_up",
            "must be 0 or more, and less than requests",
        )

    @property
    def finite(self) -> bool:
        """True if the workload is a single recorded trace."""
        phases = parse_phases(self.workload)
        return len(phases) == 1 and len(phases[0].mix) == 1 and phases[0].mix[0].finite


def _require(fine: bool, field: str, why: str) -> None:
    if not fine:
        raise BadRequest(f"{field}: {why}", field)


class FollowUp(NamedTuple):
    """A later turn of a conversation. Before ``request`` is sent, a tool runs or a user thinks ``pause`` seconds."""

    pause: float
    request: Request
    is_after_tool: bool


class PlannedTraffic:
    """The requests of a planned workload, which are made on demand. Equal seeds give equal requests."""

    def __init__(self, workload: PlannedWorkload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        # By the name of a running request: its conversation, the tokens before its answer, and its turn.
        self._open: dict[str, tuple[Conversation, tuple[int, ...], int]] = {}

    def arrivals(self) -> Iterator[tuple[float, Request]]:
        """Yield ``(arrival time in seconds, first request)`` of each conversation, in the order of arrival."""
        number = 0
        for when, conversation in self._timed():
            yield when, self._request(f"r{number}", conversation, (), 0)
            number += conversation.requests

    def _plan(self) -> Iterator[Conversation]:
        return plan(parse_phases(self._workload.workload), self._workload.requests, WORDS, self._seed)

    def _timed(self) -> Iterator[tuple[float, Conversation]]:
        given = self._workload
        if given.arrivals == "trace" and given.rate is not None:
            # Read twice and not stored: the prompts of a trace may have gigabytes.
            offsets = [conversation.offset or 0.0 for conversation in self._plan()]
            yield from zip(replayed(offsets, given.rate), self._plan(), strict=True)
        elif given.arrivals == "trace":
            first: float | None = None
            for conversation in self._plan():  # conversations are in the order of their times
                offset = conversation.offset or 0.0
                first = offset if first is None else first
                yield offset - first, conversation
        else:
            chance = random.Random(f"{self._seed} arrivals")
            gaps = gaps_of(given.arrivals, given.rate or 1.0, given.burstiness, chance)
            when = next(gaps)
            for conversation in self._plan():
                yield when, conversation
                when += sum(itertools.islice(gaps, conversation.requests))

    def _request(self, name: str, conversation: Conversation, said: tuple[int, ...], turn: int) -> Request:
        asked = conversation.turns[turn]
        prompt = said + asked.tokens
        session = name.rstrip(LATER) if len(conversation.turns) > 1 else None
        if turn + 1 < len(conversation.turns):
            self._open[name] = conversation, prompt, turn
        return Request(
            seq_id=name, prompt=prompt, sampling_params={"max_tokens": asked.output_len}, session=session
        )  # fmt: skip

    def after(self, request: Request, output: Sequence[int]) -> FollowUp | None:
        """Return the next turn after the answer to a request, or None at the end of the conversation."""
        found = self._open.pop(request.seq_id, None)
        if found is None:
            return None
        conversation, said, turn = found
        following = self._request(request.seq_id + LATER, conversation, (*said, *output), turn + 1)
        next_turn = conversation.turns[turn + 1]
        return FollowUp(next_turn.think_time, following, next_turn.is_after_tool)

    def unsent(self, request: Request) -> int:
        """Return the number of later requests that are not sent because this request failed."""
        found = self._open.pop(request.seq_id, None)
        return 0 if found is None else len(found[0].turns) - 1 - found[2]
