"""Synthetic workloads: lines of the sonnets, random tokens, shared prefixes, and sessions of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from random import Random
from typing import Annotated

import msgspec

from tercet_lab.bench.workloads.conversations import (
    Conversation,
    ConversationTurn,
    Count,
    Draw,
    Seconds,
    Spread,
    Tokens,
    Vocabulary,
    Workload,
    draw_length,
    random_ids,
)

INSTRUCTION = "Recite lines of the verses below in any order, {output_len} tokens of them, and do not stop early.\n\n"


class MadeUp(Workload, frozen=True):
    """A workload with drawn lengths in tokens: normal, with a mean and a standard deviation, and at least 1."""

    input_len: Tokens = 512
    input_len_std: Spread = 0.0
    output_len: Tokens = 128
    output_len_std: Spread = 0.0

    def lengths(self, draw: Draw) -> tuple[int, int]:
        """Return the number of tokens that one request adds to its prompt, and the number of tokens of its answer."""
        prompt = draw_length(self.input_len, self.input_len_std, draw.shape)
        return prompt, draw_length(self.output_len, self.output_len_std, draw.shape)


class Sonnet(MadeUp, frozen=True, tag="sonnet"):
    """Prompts of sonnet lines, constructed as in LLMPerf.

    A prompt is an instruction with the length of the answer, followed by lines in random order, cut to the exact
    length. A prompt that is too short for the instruction has lines only.
    """

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        while True:
            length, answer = self.lengths(draw)
            ask = tuple(draw.vocabulary.encode(INSTRUCTION.format(output_len=answer)))
            ask = ask if len(ask) < length else ()
            yield Conversation((ConversationTurn(ask + lines.draw(length - len(ask), draw.content), answer),))


class Lines:
    """The lines of the sonnets as token ids of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._lines = [tuple(vocabulary.encode(line + "\n")) for line in sonnet_lines()]

    @staticmethod
    @lru_cache(maxsize=4)
    def of(vocabulary: Vocabulary) -> Lines:
        """Return the lines for ``vocabulary``. They are encoded once."""
        return Lines(vocabulary)

    def draw(self, count: int, rng: Random) -> tuple[int, ...]:
        """Return exactly ``count`` tokens of lines in random order. No line repeats before all lines were used."""
        found: list[int] = []
        while len(found) < count:
            for line in rng.sample(self._lines, len(self._lines)):
                found += line
                if len(found) >= count:
                    break
        return tuple(found[:count])


@lru_cache(maxsize=1)
def sonnet_lines() -> tuple[str, ...]:
    """Return the lines of the sonnets that this package ships. They are in the public domain."""
    text = resources.files("tercet_lab.bench").joinpath("data/sonnets.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line)


class RandomTokens(MadeUp, frozen=True, tag="random"):
    """Prompts of token ids that are drawn uniformly from the vocabulary. No prefix cache matches them."""

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        while True:
            length, answer = self.lengths(draw)
            yield Conversation((ConversationTurn(random_ids(draw.vocabulary, length, draw.content), answer),))


class SharedPrefix(MadeUp, frozen=True, tag="shared_prefix"):
    """Prompts of one of ``prefixes`` shared prefixes of ``prefix_len`` tokens, then ``input_len`` other tokens."""

    prefixes: Count = 8
    prefix_len: Tokens = 1024
    input_len: Tokens = 128

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        prefixes = [random_ids(draw.vocabulary, self.prefix_len, draw.content) for _ in range(self.prefixes)]
        while True:
            chosen = draw.shape.randrange(self.prefixes)
            length, answer = self.lengths(draw)
            prompt = prefixes[chosen] + lines.draw(length, draw.content)
            yield Conversation((ConversationTurn(prompt, answer),), group=f"prefix-{chosen}")


class MultiTurnSessions(MadeUp, frozen=True, tag="sessions"):
    """Conversations of ``turns`` requests. Each request continues the earlier ones, with the target's answers.

    The first turn begins with ``system_len`` tokens that all sessions share. Each turn adds ``input_len`` tokens.
    Between an answer and the next turn, a user thinks for ``think_time`` seconds on average (exponential). For the
    share ``tool_share`` of the turns, a tool runs instead, for ``tool_time`` seconds on average.
    """

    turns: Count = 4
    system_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    input_len: Tokens = 128
    think_time: Seconds = 1.0
    tool_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    tool_time: Seconds = 1.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        system = random_ids(draw.vocabulary, self.system_len, draw.content)
        number = 0
        while True:
            turns = [self._turn(draw, lines, system if turn == 0 else (), turn) for turn in range(self.turns)]
            yield Conversation(tuple(turns), group=f"session-{number}")
            number += 1

    def _turn(self, draw: Draw, lines: Lines, before: tuple[int, ...], turn: int) -> ConversationTurn:
        length, answer = self.lengths(draw)
        is_after_tool = bool(turn and self.tool_share) and draw.shape.random() < self.tool_share
        mean = self.tool_time if is_after_tool else self.think_time
        pause = draw.shape.expovariate(1 / mean) if turn and mean else 0.0
        return ConversationTurn(before + lines.draw(length, draw.content), answer, pause, is_after_tool=is_after_tool)
