"""Workloads as users write them: ``kind,key=value,...``, mixed with ``+``, one text per phase."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tercet.bench.workloads.base import Workload
from tercet.bench.workloads.sharegpt import ShareGPT
from tercet.bench.workloads.sonnet import Sonnet
from tercet.bench.workloads.synthetic import RandomTokens, Sessions, SharedPrefix
from tercet.bench.workloads.traces import Azure, Mooncake
from tercet.protocol import BadRequest

AnyWorkload = Sonnet | RandomTokens | SharedPrefix | Sessions | ShareGPT | Mooncake | Azure
KINDS: dict[str, type[AnyWorkload]] = {
    "sonnet": Sonnet,
    "random": RandomTokens,
    "shared_prefix": SharedPrefix,
    "sessions": Sessions,
    "sharegpt": ShareGPT,
    "mooncake": Mooncake,
    "azure": Azure,
}


@dataclass(frozen=True)
class Phase:
    """A part of a run: requests of ``mix``, each kind with its weight."""

    mix: tuple[Workload, ...]


def parse_phases(texts: Sequence[str]) -> tuple[Phase, ...]:
    """One phase per text, in order; each has an equal share of the requests."""
    if not texts:
        raise BadRequest("workload: there is none", "workload")
    return tuple(parse_phase(text) for text in texts)


def parse_phase(text: str) -> Phase:
    """``sonnet,input_len=3000+random,input_len=200,weight=2``: two kinds, the second twice as often.

    Raises :class:`~tercet.protocol.BadRequest` naming the key.
    """
    # A + begins another kind only before a kind's name, so that paths may contain it.
    pieces = re.split(rf"\+(?=(?:{'|'.join(KINDS)})(?:,|\+|$))", text)
    return Phase(tuple(_workload(piece.strip()) for piece in pieces))


def _workload(text: str) -> AnyWorkload:
    kind, *pairs = text.split(",")
    if kind not in KINDS:
        raise BadRequest(f"workload: no kind {kind!r}; {_near(kind, list(KINDS), 'the kinds are')}", "workload")
    fields: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not equals:
            raise BadRequest(f"workload {kind}: {pair!r} is not KEY=VALUE", "workload")
        fields[name] = value.strip()
    return _convert(kind, fields)


def _convert(kind: str, fields: dict[str, str]) -> AnyWorkload:
    model = KINDS[kind]
    known = [field.name for field in msgspec.structs.fields(model)]
    for name in fields:
        if name not in known:
            raise BadRequest(f"workload {kind}: no key {name}; {_near(name, known, 'its keys are')}", name)
    try:
        return msgspec.convert(fields, model, strict=False)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        name = re.sub(r"[`$.]", "", path)
        given = f" (is {fields[name]})" if name in fields else ""
        raise BadRequest(f"workload {kind}: {name}: {why[:1].lower()}{why[1:]}{given}", name) from error


def _near(word: str, known: list[str], listing: str) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"{listing} {', '.join(known)}"
