"""Contexts of two categories on different engines, and one engine that changes its category while traffic flows.

    python examples/history_and_science.py

Four simulated engines answer questions about a history book and a science book. Each book is cached on two of them, and
a question goes to an engine that has its book. At first both are asked about equally often; then nearly every client
asks about science. The science book is moved to one of the history engines, by two verbs and without a forward pass,
and from then on three engines answer about science.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import Answer, migrate_context, outputs_of
from tercet.protocol import Request, Sent
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile, run_virtual

PROFILE = "llama-3.1-8b-h100-tp1"
CONTEXT, QUESTION, ANSWER = 16_000, 200, 150
BOOKS = {"history": tuple(range(CONTEXT)), "science": tuple(range(CONTEXT, 2 * CONTEXT))}
RATE, QUESTIONS = 24.0, 600


class Phase(NamedTuple):
    """A stretch of traffic: the share of science questions, and mean seconds to an answer's end by book."""

    science: float
    seconds: dict[str, float]


@dataclass
class Library:
    """The program, and what it knows: which engines have which book."""

    holders: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    async def by_book(self, request: Request, fleet: FleetView) -> Answer:
        """The least busy engine that has the book of the question."""
        book = request.headers["x-book"]
        name = min(self.holders[book], key=lambda name: fleet.fleet.member(name).in_flight)
        with fleet.engine(name) as engine:
            yield engine.start_generate(request)

    async def switch(self, fleet: EngineFleet, name: str, book: str) -> Sent | None:
        """From now on an engine answers about another book."""
        prefix = Request(seq_id=f"{book} to {name}", prompt=BOOKS[book])
        sent = await migrate_context(FleetView(fleet), prefix, self.holders[book][0], name)
        for holders in self.holders.values():
            if name in holders:
                holders.remove(name)
        self.holders[book].append(name)
        return sent


async def story() -> tuple[list[Phase], Sent | None]:
    """The three phases, and what the move sent."""
    network, profile = Network(), load_profile(PROFILE)
    engines = [SimEngine(f"engine-{n}", profile, network, EngineOptions()) for n in range(4)]
    members = [Member(engine.name, "", "both", engine) for engine in engines]
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
    library = Library({"history": ["engine-0", "engine-1"], "science": ["engine-2", "engine-3"]})
    for book, names in library.holders.items():
        for name in names:
            await _read(fleet, name, book)
    phases = [await _ask(library, fleet, 0.5), await _ask(library, fleet, 0.9)]
    sent = await library.switch(fleet, "engine-1", "science")
    return [*phases, await _ask(library, fleet, 0.9)], sent


async def _read(fleet: EngineFleet, name: str, book: str) -> None:
    request = Request(seq_id=f"{book} at {name}", prompt=BOOKS[book], sampling_params={"max_tokens": 1})
    with FleetView(fleet).engine(name) as engine:
        async for _ in engine.start_generate(request):
            pass


async def _ask(library: Library, fleet: EngineFleet, science: float) -> Phase:
    chance, loop = random.Random(f"{science}"), asyncio.get_running_loop()
    times: dict[str, list[float]] = {book: [] for book in BOOKS}

    async def answer(number: int, book: str) -> None:
        began, question = loop.time(), tuple(100_000 + number * QUESTION + n for n in range(QUESTION))
        request = Request(
            seq_id=f"{began} {number}",
            prompt=BOOKS[book] + question,
            sampling_params={"max_tokens": ANSWER},
            headers={"x-book": book},
        )
        async for _ in outputs_of(library.by_book(request, FleetView(fleet))):
            pass
        times[book].append(loop.time() - began)

    async with asyncio.TaskGroup() as tasks:
        for number in range(QUESTIONS):
            await asyncio.sleep(chance.expovariate(RATE))
            tasks.create_task(answer(number, "science" if chance.random() < science else "history"))
    return Phase(science, {book: fmean(found) for book, found in times.items()})


def main() -> None:
    """Print the story."""
    phases, sent = run_virtual(story())
    print("| science questions | history, s | science, s | |\n| ---: | ---: | ---: | --- |")
    for phase, what in zip(phases, ("two engines each", "two engines each", "engine-1 moved"), strict=True):
        print(f"| {phase.science:.0%} | {phase.seconds['history']:.2f} | {phase.seconds['science']:.2f} | {what} |")
    if sent is not None:
        computed = f"{sent.usage.computed} tokens computed"
        print(
            f"\nThe move: {sent.end - sent.begin} tokens, {sent.bytes / 1e9:.1f} GB, {sent.seconds:.2f} s, {computed}"
        )


if __name__ == "__main__":
    main()
