"""Recorded traffic, and plans that are drawn from the text form of any workload.

Recordings are Mooncake (JSON lines), Azure and BurstGPT (CSV of times and lengths), ShareGPT (conversations). The text
has one part for each phase, with kinds joined by ``+``.
"""

from __future__ import annotations

import csv
import difflib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar, cast

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.names import chosen_by_weight
from tercet.protocol.wire import UNREADABLE
from tercet.settings.declaration import complaint
from tercet_lab.bench.workloads.conversations import (
    Conversation,
    ConversationTurn,
    Count,
    Draw,
    Lines,
    MultiTurnSessions,
    RandomTokens,
    Seconds,
    SharedPrefix,
    Sonnet,
    Tokens,
    Vocabulary,
    Workload,
    random_ids,
)
from tercet_lab.block_tokens import HASHED_TEXT, BlockText, BlockTokens

logger = logging.getLogger("tercet.lab")
T = TypeVar("T")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
PEOPLE = ("human", "user")
MODELS = ("gpt", "assistant", "chatgpt", "bard", "bing", "model")
Exchange = tuple[str, str]
# Parts of a message that are text, in the names of OpenAI's two APIs.
TEXTS = ("text", "input_text", "output_text")
LONGEST_RECORDED = 2**24
"""Maximum number of tokens of a recorded prompt or answer: longer than any model's context."""
LATEST_MS = 1e12
MOST_RECORDED = 4 * 1024**3
"""Largest file of recorded requests, in bytes."""


def read_text(path: str, kind: str) -> str:
    """Return the text of a workload's file. Raise :class:`~tercet.protocol.BadRequest`, which names both."""
    from tercet.aio.files import read_named  # asyncio takes a fifth of the start of a command without a file

    if not path:
        raise BadRequest(f"workload: {kind}: path is missing; write {kind},path=FILE", "path")
    try:
        return read_named(Path(path).expanduser(), MOST_RECORDED).decode("utf-8-sig")
    except OSError as error:
        raise BadRequest(f"workload: {kind}: cannot read {path}: {error.strerror}", "path") from error
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"workload: {kind}: {path} is not UTF-8 text; unpack it first if it is compressed", "path"
        ) from error


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    """Return the lines of a file of JSON lines, numbered from 1.

    Only a line feed ends a line: ``str.splitlines`` also splits at characters that JSON strings may contain, such as
    U+2028.
    """
    return enumerate(text.split("\n"), start=1)


def left_out(kind: str, path: str, count: int, what: str) -> None:
    """Log how many records of a file are left out, and why."""
    if count:
        logger.warning("workload: %s: %s: %d %s", kind, path, count, what)


def broken(kind: str, path: str, line: int, why: str) -> BadRequest:
    """Return the error for an invalid line of a file."""
    return BadRequest(f"workload: {kind}: {path}, line {line}: {why}", "path")


class RecordedTrace(Workload, frozen=True):
    """The requests of a file, as recorded. ``max_input_len`` and ``max_output_len`` (tokens) cut longer ones."""

    path: str = ""
    max_input_len: Tokens | None = None
    max_output_len: Tokens | None = None

    def cut(self, prompt: int, answer: int) -> tuple[int, int]:
        """Return both lengths, or their limits if these are smaller."""
        return min(prompt, self.max_input_len or prompt), min(answer, self.max_output_len or answer)

    @property
    def finite(self) -> bool:
        return True


class Mooncake(RecordedTrace, frozen=True, tag="mooncake"):
    """A trace of Mooncake. Each line has ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.

    Each id represents ``block`` tokens of the prompt. Equal ids are equal tokens, so prefixes are shared as recorded.
    Tokens beyond the ids are random, and ids beyond the prompt are ignored.
    """

    block: Tokens = 512

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        rows = sorted(read_mooncake(self.path), key=lambda row: row.timestamp)
        odd = sum(1 for row in rows if row.hash_ids and len(row.hash_ids) != -(-row.input_length // self.block))
        left_out(
            "mooncake", self.path, odd, f"rows have hash_ids that are not one for each {self.block} tokens (block)"
        )
        last = max((block_id for row in rows for block_id in row.hash_ids), default=0)
        text = block_text(draw.vocabulary, draw.content_seed, self.block, last)
        for row in rows:
            length, answer = self.cut(row.input_length, row.output_length)
            ids = row.hash_ids[: -(-length // self.block)]
            prompt: Sequence[int] = BlockTokens(text, ids, 0, min(length, len(ids) * self.block))
            if len(prompt) < length:
                prompt = (*prompt, *random_ids(draw.vocabulary, length - len(prompt), draw.content))
            yield Conversation((ConversationTurn(prompt, answer),), offset=row.timestamp / 1000)


class TraceOfLengths(RecordedTrace, frozen=True):
    """A trace that has times and lengths only. Its prompts are lines of the sonnets."""

    def rows(self) -> list[tuple[float, int, int]]:
        """Return time (seconds), prompt length and answer length (tokens) of each request."""
        raise NotImplementedError

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        for at, length, answer in sorted(self.rows()):
            length, answer = self.cut(length, answer)
            yield Conversation((ConversationTurn(lines.draw(length, draw.content), answer),), offset=at)


class Azure(TraceOfLengths, frozen=True, tag="azure"):
    """A trace of Azure's LLM inference, with the columns ``TIMESTAMP,ContextTokens,GeneratedTokens``."""

    def rows(self) -> list[tuple[float, int, int]]:
        return read_lengths(self.path, "azure", AZURE_COLUMNS, timestamp)


class BurstGPT(TraceOfLengths, frozen=True, tag="burstgpt"):
    """A trace of BurstGPT: ``Timestamp`` (seconds), ``Request tokens``, ``Response tokens``; others are ignored."""

    def rows(self) -> list[tuple[float, int, int]]:
        return read_lengths(self.path, "burstgpt", BURSTGPT_COLUMNS, float)


class MooncakeRow(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace. Other fields are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=LATEST_MS)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=LONGEST_RECORDED)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=LONGEST_RECORDED)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...] = ()


def read_mooncake(path: str) -> list[MooncakeRow]:
    """Return the rows of a trace in the file's order. Raise ``BadRequest``, which names line and field.

    Rows without output are left out, and their number is logged: they cannot be measured.
    """
    decoder = msgspec.json.Decoder(MooncakeRow)
    found: list[MooncakeRow] = []
    for number, line in json_lines(read_text(path, "mooncake")):
        if line.strip():
            try:
                found.append(decoder.decode(line))
            except UNREADABLE as error:
                raise broken("mooncake", path, number, str(error)) from error
    return _measurable(found, [row for row in found if row.output_length], "mooncake", path)


def read_lengths(
    path: str, kind: str, columns: Sequence[str], seconds: Callable[[str], float]
) -> list[tuple[float, int, int]]:
    """Return time (seconds), prompt length and answer length (tokens) of each row of a CSV file.

    ``columns`` name the three columns; ``seconds`` converts the text of a time. Rows with a length of 0 are left out,
    and their number is logged. Raise :class:`~tercet.protocol.BadRequest`, which names the line.
    """
    rows = csv.DictReader(StringIO(read_text(path, kind), newline=""))
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise broken(kind, path, 1, f"the header lacks {', '.join(missing)}")
    found: list[tuple[float, int, int]] = []
    while True:
        try:
            row = next(rows, None)
            if row is None:
                break
            when, prompt, answer = (row[name] for name in columns)
            at, lengths = seconds(when), (int(prompt), int(answer))
            if min(lengths) < 0 or max(lengths) > LONGEST_RECORDED or not math.isfinite(at):
                raise ValueError(f"{when}, {prompt}, {answer} are not a time and two lengths")
            found.append((at, *lengths))
        except (TypeError, ValueError, csv.Error) as error:
            raise broken(kind, path, rows.line_num, str(error)) from error
    return _measurable(found, [row for row in found if row[1] and row[2]], kind, path)


def _measurable(found: list[T], measurable: list[T], kind: str, path: str) -> list[T]:
    # A few rows of the published traces have no output: they cannot be measured.
    left_out(kind, path, len(found) - len(measurable), "rows have a length of 0; they are left out")
    if not measurable:
        raise BadRequest(f"workload: {kind}: {path} has no requests", "path")
    return measurable


def timestamp(text: str) -> float:
    """Return the seconds since 1970 of an ISO time, in UTC if it has no zone. Digits after microseconds are dropped."""
    when = datetime.fromisoformat(text.strip())
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def block_text(vocabulary: Vocabulary, seed: str, block: int, last: int) -> BlockText:
    """Return the text of blocks of ``block`` tokens with ids up to ``last``; ``seed`` determines it."""
    digits = tuple(token for token in range(vocabulary.size) if token not in vocabulary.special)
    places = 1
    while len(digits) ** places <= last:
        places += 1
    if places > block:
        raise BadRequest(f"block: {block} tokens cannot distinguish {last + 1} blocks; give a larger block", "block")
    text = random_ids(vocabulary, HASHED_TEXT, Random(seed)) * (1 + -(-block // HASHED_TEXT))
    return BlockText(block, digits, places, text)


class ShareGPT(Workload, frozen=True, tag="sharegpt"):
    """Recorded conversations: ``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]``.

    JSON lines are accepted too. Requests are the texts of people; answers are as long as the recorded ones, or
    ``output_len`` tokens. At most ``turns`` turns of a conversation are sent, ``think_time`` seconds apart. As in
    ``vllm bench serve``, a conversation is left out if its first question or answer has fewer than ``min_len`` tokens,
    if its first question is longer than ``max_input_len``, or if both together are longer than ``max_total_len``. A
    conversation ends before the turn that makes its total exceed ``max_total_len``.
    """

    path: str = ""
    turns: Count = 1
    output_len: Tokens | None = None
    min_len: Annotated[int, msgspec.Meta(ge=1)] = 4
    max_input_len: Tokens = 1024
    max_total_len: Tokens = 2048
    think_time: Seconds = 0.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        recorded = read_sharegpt(self.path)
        number = 0
        while True:
            began_with = number
            for exchanges in draw.shape.sample(recorded, len(recorded)):
                if turns := self._turns(exchanges, draw.vocabulary):
                    yield Conversation(turns, group=f"session-{number}" if len(turns) > 1 else None)
                    number += 1
            if number == began_with:
                raise BadRequest(
                    f"workload: sharegpt: no conversation of {self.path} fits the limits; change them", "path"
                )

    def _turns(self, exchanges: list[Exchange], vocabulary: Vocabulary) -> tuple[ConversationTurn, ...]:
        found: list[ConversationTurn] = []
        total = 0
        for question, answer in exchanges[: self.turns]:
            tokens = tuple(vocabulary.encode(question))
            length = self.output_len or len(vocabulary.encode(answer))
            total += len(tokens) + length
            if total > self.max_total_len or not tokens or not length:
                break
            answer_fits = self.output_len is not None or length >= self.min_len
            if not found and not (self.min_len <= len(tokens) <= self.max_input_len and answer_fits):
                break
            found.append(ConversationTurn(tokens, length, self.think_time if found else 0.0, question))
        return tuple(found)


def read_sharegpt(path: str) -> list[list[Exchange]]:
    """Return question and answer of each turn, per conversation.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid file or one without conversations.
    """
    text = read_text(path, "sharegpt")
    others = Counter[str]()
    found = [exchanges for entry in _entries(text, path) if (exchanges := _exchanges(entry, others))]
    kinds = ", ".join(sorted(others))[:200]
    left_out("sharegpt", path, others.total(), f"messages have parts that are not text ({kinds}); they are left out")
    if not found:
        why = f": all have parts that are not text ({kinds})" if others else ""
        raise BadRequest(f"workload: sharegpt: {path} has no conversation between a person and a model{why}", "path")
    return found


def _entries(text: str, path: str) -> list[Any]:
    try:
        return msgspec.json.decode(text, type=list[Any])
    except UNREADABLE as error:
        if text.lstrip().startswith("["):
            raise BadRequest(f"workload: sharegpt: {path} is not JSON: {error}", "path") from error
    found: list[Any] = []
    for number, line in json_lines(text):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line))
            except UNREADABLE as error:
                raise broken("sharegpt", path, number, str(error)) from error
    return found


def _exchanges(entry: Any, others: Counter[str]) -> list[Exchange]:
    """Return the pairs of a person's message and the model's answer directly after it. Skip other messages.

    ``others`` counts the messages with parts that are not text, by the type of the first such part. A conversation ends
    before such a message: what follows depends on it.
    """
    fields: dict[str, Any] = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    messages = fields.get("conversations") or fields.get("conversation") or fields.get("messages")
    if not isinstance(messages, list):
        return []
    said = list[tuple[str, str]]()
    for item in cast("list[Any]", messages):
        try:
            message = _message(item)
        except _NoText as other:
            others[str(other)] += 1
            break
        if message is not None:
            said.append(message)
    return [
        (question, answer)
        for (asker, question), (teller, answer) in pairwise(said)
        if asker in PEOPLE and teller in MODELS and question
    ]


class _NoText(Exception):
    """A part of a message is not text; the argument is its type."""


def _message(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, dict):
        return None
    fields = cast("dict[str, Any]", item)
    who, what = fields.get("from", fields.get("role")), fields.get("value", fields.get("content"))
    if isinstance(what, list):
        what = "".join(_text_of(part) for part in cast("list[Any]", what))
    return (who.lower(), what) if isinstance(who, str) and isinstance(what, str) else None


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else dict[str, Any]()
    kind, text = str(fields.get("type", "text")), fields.get("text")
    if kind in TEXTS and isinstance(text, str):
        return text
    raise _NoText((kind if fields else repr(cast("object", part)))[:40])


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


def is_one_trace(phases: Sequence[Phase]) -> bool:
    """True if a workload is a single recorded trace."""
    return len(phases) == 1 and len(phases[0].mix) == 1 and phases[0].mix[0].finite


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
            if len(phase.mix) != 1 or not phase.mix[0].finite:
                raise BadRequest("num-prompts: is missing; give it, since this workload has no end", "num-prompts")
            drawn = phase.mix[0].conversations(_draw(vocabulary, seed, words, f"{index}/0"))
        else:
            share = count // len(phases) + (index < count % len(phases)) + (warmups if index == 0 else 0)
            drawn = _take(_mixed(phase, vocabulary, seed, words, index), share)
        for conversation in drawn:
            yield replace(conversation, phase=index) if index else conversation


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
