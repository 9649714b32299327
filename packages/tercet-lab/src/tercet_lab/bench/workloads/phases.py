"""The text form of workloads (one text per phase, kinds joined with ``+``), and plans that are drawn from them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.weights import chosen_by_weight
from tercet.settings.declaration import complaint
from tercet_lab.bench.workloads.conversations import Conversation, Draw, Vocabulary, Workload
from tercet_lab.bench.workloads.recorded import Azure, BurstGPT, Mooncake, ShareGPT
from tercet_lab.bench.workloads.synthetic import MultiTurnSessions, RandomTokens, SharedPrefix, Sonnet

AnyWorkload = Sonnet | RandomTokens | SharedPrefix | MultiTurnSessions | ShareGPT | Mooncake | Azure | BurstGPT
KINDS: dict[str, type[AnyWorkload]] = {
    "sonnet": Sonnet,
    "random": RandomTokens,
    "shared_prefix": SharedPrefix,
    "sessions": MultiTurnSessions,
    "sharegpt": ShareGPT,
    "mooncake": Mooncake,
    "azure": Azure,
    "burstgpt": BurstGPT,
}


@dataclass(frozen=True)
class Phase:
    """One part of a run: requests of the kinds in ``mix``, each with its weight."""

    mix: tuple[Workload, ...]


def parse_phases(texts: Sequence[str]) -> tuple[Phase, ...]:
    """Return one phase per text, in order. Raise :class:`~tercet.protocol.BadRequest` without texts."""
    if not texts:
        raise BadRequest("workload: is empty; give at least one kind", "workload")
    return tuple(parse_phase(text) for text in texts)


def parse_phase(text: str) -> Phase:
    """Return the phase of a text: kinds with keys, joined with ``+``.

    ``sonnet,input_len=3000+random,input_len=200,weight=2`` has two kinds, the second twice as often. Raise
    :class:`~tercet.protocol.BadRequest` that names the key.
    """
    # A + begins another kind only before the name of a kind, so that paths may contain it.
    pieces = re.split(rf"\+(?=(?:{'|'.join(KINDS)})(?:,|\+|$))", text)
    return Phase(tuple(_workload(piece.strip()) for piece in pieces))


def _workload(text: str) -> AnyWorkload:
    kind, *pairs = text.split(",")
    if kind not in KINDS:
        raise BadRequest(f"workload: {kind!r} is not a kind; {_near(kind, list(KINDS), 'the kinds are')}", "workload")
    fields: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not equals:
            raise BadRequest(f"workload: {kind}: {pair!r} is not KEY=VALUE", "workload")
        fields[name] = value.strip()
    return _convert(kind, fields)


def _convert(kind: str, fields: dict[str, str]) -> AnyWorkload:
    model = KINDS[kind]
    known = [field.name for field in msgspec.structs.fields(model)]
    for name in fields:
        if name not in known:
            raise BadRequest(f"workload: {kind}: {name} is not a key; {_near(name, known, 'its keys are')}", name)
    try:
        return msgspec.convert(fields, model, strict=False)
    except msgspec.ValidationError as error:
        name = re.sub(r"[`$.]", "", str(error).partition(" - at ")[2])
        raise complaint(f"workload: {kind}", model, fields, error, name) from error


def _near(word: str, known: list[str], listing: str) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"{listing} {', '.join(known)}"


def plan(
    phases: Sequence[Phase],
    count: int | None,
    vocabulary: Vocabulary,
    seed: int | str,
    content: int | str | None = None,
    warmups: int = 0,
) -> Iterator[Conversation]:
    """Yield conversations with ``count`` requests in total, in the order in which they begin (None: a whole trace).

    ``seed`` decides lengths, order and pauses; ``content`` (None: ``seed``) decides the words. Phases have equal shares
    of the requests; if these do not divide evenly, the first phases have one more. The last conversation of a phase is
    cut where the phase ends. ``warmups`` more requests come first, from the first phase; a whole trace has no more
    requests, and its first ones are the warm-up. Raise :class:`~tercet.protocol.BadRequest` if a trace has fewer
    requests than ``count``.
    """
    words = seed if content is None else content
    for index, phase in enumerate(phases):
        if count is None:
            drawn = _all_of(phase, _draw(vocabulary, seed, words, f"{index}/0"))
        else:
            share = count // len(phases) + (index < count % len(phases)) + (warmups if index == 0 else 0)
            drawn = _take(_mixed(phase, vocabulary, seed, words, index), share)
        for conversation in drawn:
            yield replace(conversation, phase=index) if index else conversation


def _all_of(phase: Phase, draw: Draw) -> Iterator[Conversation]:
    if len(phase.mix) != 1 or not phase.mix[0].finite:
        raise BadRequest("num-prompts: is missing; give it, since this workload has no end", "num-prompts")
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
        following = next(sources[chosen_by_weight(weights, choice.random())], None)
        if following is None:
            return
        yield following


def _take(conversations: Iterator[Conversation], requests: int) -> Iterator[Conversation]:
    """Yield conversations with ``requests`` requests in total."""
    left = requests
    while left:
        following = next(conversations, None)
        if following is None:
            raise BadRequest(f"num-prompts: is {requests}, and the trace has {requests - left} requests", "num-prompts")
        turns = following.turns[:left]
        left -= len(turns)
        yield replace(following, turns=turns)


def _draw(vocabulary: Vocabulary, seed: int | str, words: int | str, place: str) -> Draw:
    return Draw(vocabulary, Random(f"{seed}/{place}/shape"), Random(f"{words}/{place}/content"), f"{words}/{place}")
