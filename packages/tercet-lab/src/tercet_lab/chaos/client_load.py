"""Clients that send the same questions to a fleet repeatedly, and record all answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from tercet.aio import TaskSet
from tercet.protocol import TercetError
from tercet_lab.chaos.chaos_report import ClientRecord, Piece

LOAD_VOCABULARY = 30_000
# Number of prefixes that questions share, like system prompts.
SHARED_PREFIXES = 4


class AnswerBrokenOff(TercetError):
    """The error of an answer that ended too early, without a reason."""

    code = "answer_broken_off"


class Question(msgspec.Struct, frozen=True):
    """A prompt as token ids, with the number of requested tokens."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the load: ``rate`` in requests per second, ``questions`` different questions, lengths in tokens.

    ``leaving`` is the share of clients that leave before the end of their answers.
    """

    rate: float
    questions: int
    shortest_prompt: int
    longest_prompt: int
    shortest_answer: int
    longest_answer: int
    leaving: float = 0.1
    programs: tuple[str, ...] = ("disaggregated",)
    vocabulary: int = LOAD_VOCABULARY


class Arrival(msgspec.Struct, frozen=True):
    """One request, at a time in seconds. Its client leaves after ``leaves_after`` events (None: it does not leave)."""

    at: float
    name: str
    question: Question
    program: str
    leaves_after: int | None


def questions_of(shape: LoadShape, seed: int) -> list[Question]:
    """Return the questions of clients. Half of the prompts share prefixes with others."""
    chance = random.Random(f"{seed} questions")
    length = shape.shortest_prompt // 2
    prefixes = [_tokens(chance, shape, length) for _ in range(SHARED_PREFIXES)]
    found: list[Question] = []
    for number in range(shape.questions):
        prefix = chance.choice(prefixes) if number % 2 else ()
        size = chance.randint(shape.shortest_prompt, shape.longest_prompt)
        prompt = prefix + _tokens(chance, shape, size - len(prefix))
        found.append(Question(number, prompt, chance.randint(shape.shortest_answer, shape.longest_answer)))
    return found


def _tokens(chance: random.Random, shape: LoadShape, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(shape.vocabulary) for _ in range(count))


def arrivals(shape: LoadShape, questions: Sequence[Question], seed: int, seconds: float) -> Iterator[Arrival]:
    """Yield requests in the order of their times, which are those of a Poisson process."""
    chance, now, number = random.Random(f"{seed} arrivals"), 0.0, 0
    while (now := now + chance.expovariate(shape.rate)) < seconds:
        question, program = chance.choice(questions), chance.choice(shape.programs)
        leaves = chance.randint(1, question.max_tokens) if chance.random() < shape.leaving else None
        yield Arrival(now, f"r{number}", question, program, leaves)
        number += 1


Ask = Callable[[Arrival], AsyncIterator[Sequence[Piece]]]
"""A function that sends a request. It yields the pieces of each event, and raises ``TercetError`` for a failure."""


class ClientLoad:
    """The clients of a run, with their records. ``clock`` is in seconds from the beginning of the run."""

    def __init__(self, ask: Ask, clock: Callable[[], float], on_error: Callable[[str], object]) -> None:
        self.records: list[ClientRecord] = []
        self._ask = ask
        self._clock = clock
        self._on_error = on_error
        self._tasks = TaskSet()

    @property
    def under_way(self) -> int:
        """Number of requests that have not ended."""
        return len(self._tasks)

    async def run(self, wanted: Iterator[Arrival], sleep_until: Callable[[float], Awaitable[object]]) -> None:
        """Send every request at its time. Return when the last one is sent."""
        for arrival in wanted:
            await sleep_until(arrival.at)
            self._tasks.spawn(self._client(arrival))

    async def settle(self, seconds: float) -> None:
        """Wait for every answer, for at most ``seconds``. The records of unfinished answers stay ``pending``."""
        if not await self._tasks.wait(seconds):
            await self._tasks.close(seconds)

    async def ask_all(self, questions: Sequence[Question], program: str) -> dict[int, tuple[Piece, ...]]:
        """Send every question once, one after the other, and return the answers by question.

        Raise the first :class:`~tercet.protocol.TercetError`.
        """
        found: dict[int, tuple[Piece, ...]] = {}
        for question in questions:
            arrival = Arrival(0.0, f"calm-{question.number}", question, program, None)
            record = ClientRecord(name=arrival.name, question=question.number, began=0.0)
            async with aclosing(cast("Any", self._ask(arrival))) as events:
                async for pieces in events:
                    record.received.append((0.0, tuple(pieces)))
            found[question.number] = record.answer
        return found

    async def _client(self, arrival: Arrival) -> None:
        record = ClientRecord(
            name=arrival.name, question=arrival.question.number, began=self._clock(), program=arrival.program
        )
        self.records.append(record)
        try:
            async with aclosing(cast("Any", self._ask(arrival))) as events:
                async for pieces in events:
                    record.received.append((self._clock(), tuple(pieces)))
                    if len(record.received) == arrival.leaves_after:
                        break
            record.outcome = "answered" if len(record.received) != arrival.leaves_after else "left"
        except TercetError as error:
            record.outcome, record.error, record.message = "failed", error.code, error.message
        except asyncio.CancelledError:
            raise  # the run no longer waits for it: the record stays pending
        except Exception as error:
            record.outcome, record.error, record.message = "failed", "unhandled", repr(error)
            self._on_error(f"a client of {record.name} got {error!r}")
        record.ended = self._clock()
