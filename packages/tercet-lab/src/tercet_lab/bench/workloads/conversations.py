"""Conversations of token ids with lengths: the output of workloads, the synthetic ones, and the arrivals of requests.

Synthetic are lines of the sonnets, random tokens, shared prefixes, and sessions of several turns. Arrivals use no I/O
and no clock: they are lists of times in seconds that begin with 0. The gaps of a renewal process with ``rate`` requests
per second and ``burstiness`` b are gamma distributed with shape b and scale 1 / (rate * b): their mean is 1 / rate,
their coefficient of variation 1 / sqrt(b). ``vllm bench serve`` has the same parameter. b = 1 is a Poisson process,
b < 1 is bursty, b = infinity is a constant rate.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import accumulate, islice, repeat
from random import Random
from typing import Annotated, Literal, Protocol

import msgspec

from tercet.protocol import BadRequest

LONGEST = 20.0
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Spread = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Vocabulary(Protocol):
    """A mapping between text and the token ids of the served model."""

    @property
    def size(self) -> int:
        """Number of ids: every id is smaller."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids that are not text: end of sequence, roles, padding."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens before or after it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        ...


def random_ids(vocabulary: Vocabulary, count: int, rng: Random) -> tuple[int, ...]:
    """Return ``count`` ids, drawn uniformly from all text ids."""
    size, special = vocabulary.size, vocabulary.special
    found: list[int] = []
    while len(found) < count:
        found += [token for token in rng.choices(range(size), k=count - len(found)) if token not in special]
    return tuple(found)


class Lengths:
    """Random lengths in whole tokens, at least 1, with exactly the ``mean`` that was asked for.

    What is below 1 becomes 1, and a ``lognormal`` length above :data:`LONGEST` means becomes that. This alone would
    move the mean (a normal 512 +- 1024 cut at 1 has the mean 719), so the uncut distribution is moved until the cut one
    has the mean. Where the cut takes or gives much, the deviation is smaller than ``dev``.
    """

    def __init__(self, kind: Literal["normal", "lognormal"], mean: float, dev: float) -> None:
        self._kind = kind
        dev = min(dev, 1000 * mean)  # beyond, all mass is at the cuts, and the arithmetic overflows
        self._most = LONGEST * mean if kind == "lognormal" else math.inf
        self._sigma = math.sqrt(math.log1p((dev / mean) ** 2)) if kind == "lognormal" else dev
        self._centre = math.log(mean) - self._sigma**2 / 2 if kind == "lognormal" else mean
        # A shift below this is less than the rounding to whole tokens, and would only change what seeds give.
        if dev and abs(self._mean(self._centre) - mean) > 1e-3:
            self._centre = self._solved(mean)

    def draw(self, chance: Random) -> int:
        if not self._sigma:
            return max(1, round(math.exp(self._centre) if self._kind == "lognormal" else self._centre))
        drawn = (
            chance.lognormvariate(self._centre, self._sigma)
            if self._kind == "lognormal"
            else chance.gauss(self._centre, self._sigma)
        )
        return max(1, round(min(drawn, self._most)))

    def _mean(self, centre: float) -> float:
        """Return the mean of the cut distribution around ``centre``: the mass at each cut, and the part between."""
        sigma, most = self._sigma, self._most
        if self._kind == "normal":
            low = (1 - centre) / sigma
            density = math.exp(-(low**2) / 2) / math.sqrt(2 * math.pi)
            return _below(low) + centre * _below(-low) + sigma * density
        low, high = ((math.log(cut) - centre) / sigma for cut in (1, most))
        between = math.exp(centre + sigma**2 / 2) * (_below(high - sigma) - _below(low - sigma))
        return _below(low) + between + most * _below(-high)

    def _solved(self, mean: float) -> float:
        """Return the centre whose cut distribution has ``mean``: it grows with the centre, so halving finds it."""
        low, high = self._centre - 40 * self._sigma, self._centre + 40 * self._sigma
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < mean else (low, middle)
        return (low + high) / 2


def _below(value: float) -> float:
    """Return the share of a standard normal distribution below ``value``."""
    return math.erfc(-value / math.sqrt(2)) / 2


lengths = lru_cache(maxsize=256)(Lengths)


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One request of a conversation.

    Its prompt is the whole conversation before, with answers, followed by ``tokens``. ``think_time`` is the time from
    the end of the turn before to this turn, in seconds; ``is_after_tool`` is True if a tool ran in that time. ``text``
    is the source of ``tokens`` if the workload has texts. A turn with a recorded time ``due`` (seconds) comes then, or
    when the turn before has ended, if that is later.
    """

    tokens: Sequence[int]
    output_len: int
    think_time: float = 0.0
    text: str | None = None
    is_after_tool: bool = False
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A sequence of requests in one dialogue; most conversations have a single turn.

    ``offset`` is its time in a trace, in seconds (None: no trace). ``group`` is equal for conversations that share a
    prefix; ``phase`` is the index of the workload's phase; ``klass`` the class of objectives, if the workload has it.
    """

    turns: tuple[ConversationTurn, ...]
    offset: float | None = None
    group: str | None = None
    phase: int = 0
    klass: str = ""

    @property
    def requests(self) -> int:
        return len(self.turns)


@dataclass(frozen=True)
class Draw:
    """The sources of a workload's randomness.

    ``shape`` decides lengths, choices and pauses; ``content`` decides the words. Two runs that share only ``shape``
    request the same amount of work, and do not match each other's prefixes in a cache. ``content_seed`` is for content
    that must be the same everywhere, such as a trace's hashed blocks.
    """

    vocabulary: Vocabulary
    shape: Random
    content: Random
    content_seed: str


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One kind of requests. ``weight`` is its share of a mix, relative to the other kinds."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 1.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        """Yield conversations without end, or those of a recorded trace in order."""
        raise NotImplementedError

    @property
    def finite(self) -> bool:
        """True for a recorded trace, which ends."""
        return False


INSTRUCTION = "Recite lines of the verses below in any order, {output_len} tokens of them, and do not stop early.\n\n"


class MadeUp(Workload, frozen=True):
    """A workload with drawn lengths in tokens: normal, with a mean and a standard deviation, and at least 1."""

    input_len: Tokens = 512
    input_len_std: Spread = 0.0
    output_len: Tokens = 128
    output_len_std: Spread = 0.0

    def lengths(self, draw: Draw) -> tuple[int, int]:
        """Return the number of tokens that one request adds to its prompt, and the number of tokens of its answer."""
        prompt = lengths("normal", self.input_len, self.input_len_std).draw(draw.shape)
        return prompt, lengths("normal", self.output_len, self.output_len_std).draw(draw.shape)


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


class HashedWords:
    """A vocabulary without a model: the id of each word is its CRC-32, modulo the size.

    Equal texts have equal ids, so prefixes match as with a real tokenizer. Workloads have exact lengths in tokens; only
    the number of words per token differs from that of a model.
    """

    def __init__(self, size: int = 32_000) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def special(self) -> frozenset[int]:
        return frozenset()

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % self._size for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in ids)


LONGEST_S = 1e7
"""Longest time over which requests may arrive, in seconds. (A simulated fleet polls its engines each second of it.)"""
Arrival = Literal["poisson", "gamma", "constant", "closed", "trace"]


def gaps_of(arrivals: Arrival, rate: float, burstiness: float, chance: Random) -> Iterator[float]:
    """Return an endless iterator of gaps between arrivals, in seconds; 0 at an infinite rate.

    ``burstiness`` is the shape of ``gamma`` arrivals; all others but ``constant`` ones are a Poisson process.
    """
    refuse(not rate > 0, "request-rate", f"is {rate}, and must be more than 0")
    refuse(not burstiness > 0, "burstiness", f"is {burstiness}, and must be more than 0")
    if math.isinf(rate):
        return repeat(0.0)
    if arrivals == "constant":
        return repeat(1 / rate)
    if arrivals == "gamma":
        return iter(lambda: chance.gammavariate(burstiness, 1 / rate / burstiness), None)
    return iter(lambda: chance.expovariate(rate), None)


def arrival_times(count: int, arrivals: Arrival, rate: float, burstiness: float, chance: Random) -> list[float]:
    """Return the time at which each of ``count`` requests is due, in seconds; other arguments: :func:`gaps_of`."""
    if count == 0:
        return []
    gaps = gaps_of(arrivals, rate, burstiness, chance)
    _require_short((count - 1) / rate)
    return list(accumulate(islice(gaps, count - 1), initial=0.0))


def replayed(recorded: Sequence[float], rate: float | None = None) -> list[float]:
    """Return a trace's times from 0 on, in seconds; with ``rate``, scaled so that their mean rate is ``rate``.

    Only time is scaled: bursts stay bursts. Raise :class:`~tercet.protocol.BadRequest` for a trace whose times are all
    equal: it cannot be scaled.
    """
    if not recorded:
        return []
    first = min(recorded)
    times = [at - first for at in sorted(recorded)]
    _require_short(times[-1])
    if rate is None:
        return times
    refuse(not rate > 0, "request-rate", f"is {rate}, and must be more than 0")
    if math.isinf(rate):
        return [0.0] * len(times)
    why = "all requests of the trace have the same time; it cannot be scaled to a rate"
    refuse(times[-1] <= 0, "request-rate", why)
    _require_short((len(times) - 1) / rate)
    factor = (len(times) - 1) / rate / times[-1]
    return [at * factor for at in times]


def _require_short(seconds: float) -> None:
    late = f"the last request would arrive after {seconds:.3g} s, and the limit is {LONGEST_S:.0e} s"
    refuse(not seconds <= LONGEST_S, "request-rate", f"{late}; give a higher rate or fewer requests")


def refuse(wrong: bool, field: str, why: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest`, which names the field of a workload or a load, if it is wrong."""
    if wrong:
        raise BadRequest(f"{field}: {why}", field)
