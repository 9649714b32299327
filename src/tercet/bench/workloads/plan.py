"""A run's conversations, drawn before it starts: the same seed gives the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from tercet.bench.workloads.base import Conversation, Draw, Turn
from tercet.bench.workloads.spec import Phase
from tercet.bench.workloads.vocabulary import Vocabulary
from tercet.protocol import BadRequest

__all__ = ["Conversation", "Turn", "plan"]


def plan(
    phases: Sequence[Phase],
    count: int | None,
    vocabulary: Vocabulary,
    seed: int | str,
    content: int | str | None = None,
    warmups: int = 0,
) -> list[Conversation]:
    """``count`` requests, in the order in which they begin; all of a trace when ``count`` is None.

    ``seed`` decides lengths, order and pauses; ``content`` (``seed`` if None) decides the words. Phases have equal
    shares of the requests, the first ones one more where they do not divide. The last conversation of a phase is cut
    where the phase ends. ``warmups`` more requests come first, of the first phase; those of a whole trace are its own
    first ones. Raises :class:`~tercet.protocol.BadRequest` when a trace has fewer requests than asked for.
    """
    words = seed if content is None else content
    if count is None:
        return [
            replace(conversation, phase=index)
            for index, phase in enumerate(phases)
            for conversation in _all_of(phase, _draw(vocabulary, seed, words, f"{index}/0"))
        ]
    found: list[Conversation] = []
    for index, phase in enumerate(phases):
        share = count // len(phases) + (index < count % len(phases)) + (warmups if index == 0 else 0)
        drawn = _mixed(phase, vocabulary, seed, words, index)
        found += [replace(conversation, phase=index) for conversation in _take(drawn, share)]
    return found


def _all_of(phase: Phase, draw: Draw) -> Iterator[Conversation]:
    if len(phase.mix) != 1 or not phase.mix[0].finite:
        raise BadRequest("num-prompts: must be given, since this workload has no end of its own", "num-prompts")
    return phase.mix[0].conversations(draw)


def _mixed(
    phase: Phase, vocabulary: Vocabulary, seed: int | str, words: int | str, index: int
) -> Iterator[Conversation]:
    sources = [
        kind.conversations(_draw(vocabulary, seed, words, f"{index}/{number}")) for number, kind in enumerate(phase.mix)
    ]
    weights = [kind.weight for kind in phase.mix]
    choice = Random(f"{seed}/{index}/choice")
    while True:
        (source,) = choice.choices(sources, weights)
        following = next(source, None)
        if following is None:
            return
        yield following


def _take(conversations: Iterator[Conversation], requests: int) -> Iterator[Conversation]:
    """Conversations of ``requests`` requests in total."""
    left = requests
    while left:
        following = next(conversations, None)
        if following is None:
            raise BadRequest(f"num-prompts: the trace has {requests - left} requests, not {requests}", "num-prompts")
        turns = following.turns[:left]
        left -= len(turns)
        yield replace(following, turns=turns)


def _draw(vocabulary: Vocabulary, seed: int | str, words: int | str, place: str) -> Draw:
    return Draw(vocabulary, Random(f"{seed}/{place}/shape"), Random(f"{words}/{place}/content"), f"{words}/{place}")
