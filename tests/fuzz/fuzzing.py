"""Runs targets: cases from a seed, what is new kept to start from, what fails kept for good, nothing that grows."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil

from tests.fuzz.mutation import Case, Codec, Mutator

CORPUS = Path(__file__).parent / "corpus"
CASE_SECONDS = 30  # for what takes a millisecond: other work of the machine may hold it up
POOL = 300
# What a process may grow by, in all, however many cases: caches that fill up, and pieces that allocators keep.
MOST_MEGABYTES, MOST_DESCRIPTORS, MOST_TASKS, MOST_THREADS = 96, 8, 2, 4
WARM_UP = 200


class Outcome(NamedTuple):
    """What came of a case: how many items were said, and in a few words what happened."""

    items: int
    happened: str


class Room(Protocol):
    """What a case is run against; it lives for many cases. A case must leave nothing in it."""

    async def run(self, case: Case) -> Outcome:
        """Raises ``AssertionError``, or what came out that should not."""
        ...


@dataclass(frozen=True)
class Target:
    """A parser and what is behind it. ``unit`` is what an item is called: ``frames`` or ``calls``."""

    name: str
    seeds: Callable[[], list[Case]]
    codec: Codec
    room: Callable[[], AbstractAsyncContextManager[Room]]
    unit: str = "frames"


@dataclass
class Run:
    """Figures of a run; ``failed`` are the files of the cases that failed."""

    cases: int = 0
    items: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    megabytes: float = 0.0
    happened: dict[str, int] = field(default_factory=dict[str, int])
    ended: dict[str, Case] = field(default_factory=dict[str, Case])
    failed: list[tuple[Path, BaseException]] = field(default_factory=list[tuple[Path, BaseException]])


class Hang(BaseException):
    """A case does not end."""


class Held(NamedTuple):
    """What this process holds."""

    megabytes: float
    descriptors: int
    tasks: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        used = psutil.Process().memory_info().rss / 2**20
        return cls(used, len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), threading.active_count())

    def has_grown(self, before: Held) -> bool:
        allowed = (MOST_MEGABYTES, MOST_DESCRIPTORS, MOST_TASKS, MOST_THREADS)
        return any(now - then > most for now, then, most in zip(self, before, allowed, strict=True))


@contextmanager
def bounded(seconds: int = CASE_SECONDS) -> Generator[None]:
    """Raise :class:`Hang` in the middle of whatever takes longer, also where no event loop turns.

    Again each second, as who is interrupted may swallow it. An alarm that was set before goes on afterwards: pytest's
    limit for a whole test is one.
    """

    def ring(*_: Any) -> None:
        raise Hang(f"a case took more than {seconds} s")

    began, before = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.001), interval)


def corpus_of(target: Target) -> dict[Path, Case]:
    """The cases that are kept."""
    files = sorted((CORPUS / target.name).glob("*.msgpack"))
    return {file: msgspec.msgpack.decode(file.read_bytes(), type=Case) for file in files}


def keep(target: Target, case: Case, folder: Path = CORPUS) -> Path:
    """Write a case down; its name follows from what is in it."""
    content = msgspec.msgpack.encode(case)
    file = folder / target.name / f"{hashlib.sha256(content).hexdigest()[:12]}.msgpack"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


async def replay(target: Target) -> int:
    """Run all seeds and what is kept; returns how many cases that were. Raises what a case raises."""
    cases = [*target.seeds(), *corpus_of(target).values()]
    async with target.room() as room:
        for case in cases:
            with bounded():
                await room.run(case)
    return len(cases)


async def fuzz(
    target: Target, seed: int, items: int, progress: Callable[[Run], None] = lambda _: None, most_failures: int = 5
) -> Run:
    """Run cases until ``items`` have been said, or too many have failed; those are kept in the corpus."""
    kept = list(corpus_of(target).values())
    mutator = Mutator(Random(f"{seed}/{target.name}"), target.seeds(), target.codec)
    run, began, before = Run(), time.monotonic(), None
    pool = run.ended
    pool.update({f"kept {index}": case for index, case in enumerate(kept)})
    async with target.room() as room:
        while run.items < items and len(run.failed) < most_failures:
            case = mutator.case(list(pool.values()) if run.cases % 64 == 0 else _some(pool))
            at = time.monotonic()
            try:
                with bounded():
                    outcome = await room.run(case)
            except (Exception, Hang) as error:
                run.failed.append((keep(target, case), error))
                outcome = Outcome(len(case), f"{type(error).__name__}")
            run.cases += 1
            run.items += outcome.items
            run.slowest = max(run.slowest, time.monotonic() - at)
            run.seconds = time.monotonic() - began
            if outcome.happened not in run.happened and len(pool) < POOL:
                pool[outcome.happened] = case
            if outcome.happened in run.happened or len(run.happened) < 10 * POOL:
                run.happened[outcome.happened] = run.happened.get(outcome.happened, 0) + 1
            if run.cases == WARM_UP:
                before = Held.now()
            progress(run)
        if before is not None:
            run.megabytes = await _require_no_growth(before)
    return run


async def _require_no_growth(before: Held) -> float:
    """What ends by itself has a while to do so; returns by how many megabytes the process has grown."""
    deadline = time.monotonic() + CASE_SECONDS
    while (now := Held.now()).has_grown(before):
        assert time.monotonic() < deadline, f"grown: from {before} to {now}"
        await asyncio.sleep(0.1)
    return now.megabytes - before.megabytes


def _some(pool: dict[str, Case]) -> list[Case]:
    """The pool; its newest half, most of the time, is what has been looked at least."""
    return list(pool.values())[-POOL // 2 :]
