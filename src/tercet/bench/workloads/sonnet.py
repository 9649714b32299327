"""Prompts from Shakespeare's sonnets, built as LLMPerf builds its own: an instruction, then lines in random order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from random import Random

from tercet.bench.workloads.base import Conversation, Draw, Spread, Tokens, Turn, Workload
from tercet.bench.workloads.lengths import draw_length
from tercet.bench.workloads.vocabulary import Vocabulary

INSTRUCTION = "Recite lines of the verses below in any order, {output_len} tokens of them, and do not stop early.\n\n"


class Sonnet(Workload, frozen=True, tag="sonnet"):
    """LLMPerf's construction: lengths in tokens are normal with mean and deviation, and never below 1.

    A prompt is an instruction that names the length of the answer, followed by lines in random order, cut to the exact
    length. A prompt that is too short for the instruction has lines only.
    """

    input_len: Tokens = 512
    input_len_std: Spread = 0.0
    output_len: Tokens = 128
    output_len_std: Spread = 0.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        lines = Lines.of(draw.vocabulary)
        while True:
            length = draw_length(self.input_len, self.input_len_std, draw.shape)
            answer = draw_length(self.output_len, self.output_len_std, draw.shape)
            ask = tuple(draw.vocabulary.encode(INSTRUCTION.format(output_len=answer)))
            ask = ask if len(ask) < length else ()
            yield Conversation((Turn(ask + lines.draw(length - len(ask), draw.content), answer),))


class Lines:
    """The sonnets' lines in a vocabulary's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._lines = [tuple(vocabulary.encode(line + "\n")) for line in sonnet_lines()]

    @staticmethod
    @lru_cache(maxsize=4)
    def of(vocabulary: Vocabulary) -> Lines:
        """The lines in ``vocabulary``; encoded once."""
        return Lines(vocabulary)

    def draw(self, count: int, rng: Random) -> tuple[int, ...]:
        """Exactly ``count`` tokens of lines in random order; no line comes again before all of them came."""
        found: list[int] = []
        while len(found) < count:
            for line in rng.sample(self._lines, len(self._lines)):
                found += line
                if len(found) >= count:
                    break
        return tuple(found[:count])


@lru_cache(maxsize=1)
def sonnet_lines() -> tuple[str, ...]:
    """The lines of the sonnets that this package ships; they are in the public domain."""
    text = resources.files("tercet.bench").joinpath("data/sonnets.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line)
