"""Conversations of people, in the format of the ShareGPT files or as OpenAI messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, cast

import msgspec

from tercet.bench.workloads.base import Conversation, Count, Draw, Seconds, Tokens, Turn, Workload
from tercet.bench.workloads.files import broken, read_text
from tercet.bench.workloads.vocabulary import Vocabulary
from tercet.protocol import BadRequest

PEOPLE = ("human", "user")
MODELS = ("gpt", "assistant", "chatgpt", "bard", "bing", "model")
Exchange = tuple[str, str]


class ShareGPT(Workload, frozen=True, tag="sharegpt"):
    """``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]``; JSON lines do as well.

    Requests are what people wrote; answers are as long as the recorded ones, or ``output_len`` tokens. ``turns`` limits
    how many of a conversation's turns are sent, and ``think_time`` (seconds) passes between them. Left out, as in
    ``vllm bench serve``: conversations whose first question or answer has fewer than ``min_len`` tokens, or whose first
    question is longer than ``max_input_len``, or than ``max_total_len`` together with its answer; a conversation ends
    before the turn that takes its total past ``max_total_len``.
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
                raise BadRequest(f"workload sharegpt: no conversation of {self.path} is within the limits", "path")

    def _turns(self, exchanges: list[Exchange], vocabulary: Vocabulary) -> tuple[Turn, ...]:
        found: list[Turn] = []
        total = 0
        for question, answer in exchanges[: self.turns]:
            tokens = tuple(vocabulary.encode(question))
            length = self.output_len or len(vocabulary.encode(answer))
            total += len(tokens) + length
            if total > self.max_total_len or not tokens or not length:
                break
            if not found and not self._fits(len(tokens), length):
                break
            found.append(Turn(tokens, length, self.think_time if found else 0.0, question))
        return tuple(found)

    def _fits(self, question: int, answer: int) -> bool:
        long_enough = question >= self.min_len and (self.output_len is not None or answer >= self.min_len)
        return long_enough and question <= self.max_input_len


def read_sharegpt(path: str) -> list[list[Exchange]]:
    """Question and answer of each turn, per conversation; raises :class:`~tercet.protocol.BadRequest`."""
    text = read_text(path, "sharegpt")
    entries = _entries(text, path)
    found = [exchanges for entry in entries if (exchanges := _exchanges(entry))]
    if not found:
        raise BadRequest(f"workload sharegpt: {path} has no conversation of a person with a model", "path")
    return found


def _entries(text: str, path: str) -> list[Any]:
    try:
        return msgspec.json.decode(text, type=list[Any])
    except msgspec.MsgspecError as error:
        if text.lstrip().startswith("["):
            raise BadRequest(f"workload sharegpt: {path} is not JSON: {error}", "path") from error
    found: list[Any] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line))
            except msgspec.MsgspecError as error:
                raise broken("sharegpt", path, number, str(error)) from error
    return found


def _exchanges(entry: Any) -> list[Exchange]:
    """The pairs of a person's message and the model's answer right after it; files hold much that is neither."""
    fields: dict[str, Any] = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    messages = fields.get("conversations") or fields.get("conversation") or fields.get("messages")
    if not isinstance(messages, list):
        return []
    said = [message for item in cast("list[Any]", messages) if (message := _message(item)) is not None]
    pairs = pairwise(said)
    return [
        (question, answer)
        for (asker, question), (teller, answer) in pairs
        if asker in PEOPLE and teller in MODELS and question
    ]


def _message(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, dict):
        return None
    fields = cast("dict[str, Any]", item)
    who, what = fields.get("from", fields.get("role")), fields.get("value", fields.get("content"))
    return (who.lower(), what) if isinstance(who, str) and isinstance(what, str) else None
