"""Random tokens, sets of shared prefixes, and sessions of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from tercet.bench.workloads.base import Conversation, Count, Draw, Seconds, Spread, Tokens, Turn, Workload
from tercet.bench.workloads.lengths import draw_length
from tercet.bench.workloads.sonnet import Lines
from tercet.bench.workloads.vocabulary import random_ids


class RandomTokens(Workload, frozen=True, tag="random"):
    """Token ids drawn uniformly from the vocabulary: nothing is ever found in a prefix cache."""

    input_len: Tokens = 512
    input_len_std: Spread = 0.0
    output_len: Tokens = 128
    output_len_std: Spread = 0.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        while True:
            length = draw_length(self.input_len, self.input_len_std, draw.shape)
            answer = draw_length(self.output_len, self.output_len_std, draw.shape)
            yield Conversation((Turn(random_ids(draw.vocabulary, length, draw.content), answer),))


class SharedPrefix(Workload, frozen=True, tag="shared_prefix"):
    """``prefixes`` prefixes of ``prefix_len`` tokens; each request has one, and ``input_len`` tokens of its own."""

    prefixes: Count = 8
    prefix_len: Tokens = 1024
    input_len: Tokens = 128
    input_len_std: Spread = 0.0
    output_len: Tokens = 128
    output_len_std: Spread = 0.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        prefixes = [random_ids(draw.vocabulary, self.prefix_len, draw.content) for _ in range(self.prefixes)]
        while True:
            chosen = draw.shape.randrange(self.prefixes)
            length = draw_length(self.input_len, self.input_len_std, draw.shape)
            answer = draw_length(self.output_len, self.output_len_std, draw.shape)
            prompt = prefixes[chosen] + lines.draw(length, draw.content)
            yield Conversation((Turn(prompt, answer),), group=f"prefix-{chosen}")


class Sessions(Workload, frozen=True, tag="sessions"):
    """Conversations of ``turns`` requests that carry on what was said, the target's own answers included.

    The first turn begins with ``system_len`` tokens that all sessions share. Each turn adds ``input_len`` tokens. A
    user thinks for ``think_time`` seconds in the mean (exponential) between an answer and the next turn.
    """

    turns: Count = 4
    system_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    input_len: Tokens = 128
    input_len_std: Spread = 0.0
    output_len: Tokens = 128
    output_len_std: Spread = 0.0
    think_time: Seconds = 1.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        system = random_ids(draw.vocabulary, self.system_len, draw.content)
        number = 0
        while True:
            turns = [self._turn(draw, lines, system if turn == 0 else (), turn) for turn in range(self.turns)]
            yield Conversation(tuple(turns), group=f"session-{number}")
            number += 1

    def _turn(self, draw: Draw, lines: Lines, before: tuple[int, ...], turn: int) -> Turn:
        length = draw_length(self.input_len, self.input_len_std, draw.shape)
        answer = draw_length(self.output_len, self.output_len_std, draw.shape)
        pause = draw.shape.expovariate(1 / self.think_time) if turn and self.think_time else 0.0
        return Turn(before + lines.draw(length, draw.content), answer, pause)
