"""Recorded traffic: Mooncake's JSON lines and Azure's CSV. Both hold times and lengths, no words."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from random import Random
from typing import Annotated, TypeVar

import msgspec

from tercet.bench.workloads.base import Conversation, Draw, Tokens, Turn, Workload
from tercet.bench.workloads.files import broken, read_text
from tercet.bench.workloads.sonnet import Lines
from tercet.bench.workloads.vocabulary import Vocabulary, random_ids
from tercet.protocol import BadRequest

T = TypeVar("T")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Mooncake(Workload, frozen=True, tag="mooncake"):
    """Mooncake's trace: per line ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.

    Each id stands for ``block`` tokens of the prompt, and the same id for the same tokens, so that prefixes are shared
    as they were recorded. ``max_input_len`` and ``max_output_len`` cut what is longer.
    """

    path: str = ""
    block: Tokens = 512
    max_input_len: Tokens | None = None
    max_output_len: Tokens | None = None

    @property
    def finite(self) -> bool:
        return True

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        for row in sorted(read_mooncake(self.path), key=lambda row: row.timestamp):
            length = at_most(row.input_length, self.max_input_len)
            prompt = block_tokens(row.hash_ids, self.block, length, draw.vocabulary, draw.content_seed)
            if len(prompt) < length:
                prompt += random_ids(draw.vocabulary, length - len(prompt), draw.content)
            answer = at_most(row.output_length, self.max_output_len)
            yield Conversation((Turn(prompt, answer),), offset=row.timestamp / 1000)


class Azure(Workload, frozen=True, tag="azure"):
    """Azure's LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``; prompts are lines of the sonnets.

    ``max_input_len`` and ``max_output_len`` cut what is longer.
    """

    path: str = ""
    max_input_len: Tokens | None = None
    max_output_len: Tokens | None = None

    @property
    def finite(self) -> bool:
        return True

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        for at, length, answer in sorted(read_azure(self.path)):
            prompt = lines.draw(at_most(length, self.max_input_len), draw.content)
            yield Conversation((Turn(prompt, at_most(answer, self.max_output_len)),), offset=at)


class MooncakeRow(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace; whatever else it has is left alone."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: str) -> list[MooncakeRow]:
    """The rows of a trace in its file's order; raises :class:`~tercet.protocol.BadRequest` naming the line."""
    decoder = msgspec.json.Decoder(MooncakeRow)
    found: list[MooncakeRow] = []
    for number, line in enumerate(read_text(path, "mooncake").splitlines(), start=1):
        if line.strip():
            try:
                found.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise broken("mooncake", path, number, str(error)) from error
    return _some(found, "mooncake", path)


def read_azure(path: str) -> list[tuple[float, int, int]]:
    """Time (seconds), prompt and answer lengths of each row; raises :class:`~tercet.protocol.BadRequest`."""
    rows = csv.DictReader(read_text(path, "azure").splitlines())
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise broken("azure", path, 1, f"no column {', '.join(missing)}")
    found: list[tuple[float, int, int]] = []
    for row in rows:
        try:
            when, prompt, answer = (row[name] for name in AZURE_COLUMNS)
            lengths = int(prompt), int(answer)
            if min(lengths) < 0:
                raise ValueError("a length is negative")
            found.append((timestamp(when), *lengths))
        except (TypeError, ValueError) as error:
            raise broken("azure", path, rows.line_num, str(error)) from error
    # A few rows of the published traces generated nothing: there is nothing to measure about them.
    return _some([row for row in found if row[1] and row[2]], "azure", path)


def timestamp(text: str) -> float:
    """Seconds since 1970; UTC where the text names no zone. Fractions beyond microseconds are dropped."""
    when = datetime.fromisoformat(text.strip())
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def block_tokens(
    hash_ids: tuple[int, ...], block: int, length: int, vocabulary: Vocabulary, seed: str
) -> tuple[int, ...]:
    """The tokens that the hashed blocks stand for, cut to ``length``."""
    found: list[int] = []
    for block_id in hash_ids:
        if len(found) >= length:
            break
        found += random_ids(vocabulary, block, Random(f"{seed}/{block_id}"))
    return tuple(found[:length])


def at_most(value: int, limit: int | None) -> int:
    """``value``, cut to ``limit`` if there is one."""
    return value if limit is None else min(value, limit)


def _some(found: list[T], kind: str, path: str) -> list[T]:
    if not found:
        raise BadRequest(f"workload {kind}: {path} has no requests", "path")
    return found
