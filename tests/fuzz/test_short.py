"""Every target for a moment: seeds, what the corpus keeps, and some new cases. The long run is ``make fuzz``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import CORPUS, Target, bounded, fuzz, replay
from tests.fuzz.mutation import Mutator
from tests.fuzz.targets.all import TARGETS
from tests.long_runs import FULL

ITEMS = {"frames": 1500, "calls": 60} if FULL else {"frames": 500, "calls": 30}
SEED = 20261122
QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Every refusal is a line in a log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
async def test_what_is_known_is_taken_or_refused(target: Target) -> None:
    assert await replay(target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
async def test_what_is_new_is_taken_or_refused(target: Target) -> None:
    run = await fuzz(target, SEED, ITEMS[target.unit])
    assert run.items >= ITEMS[target.unit]
    assert len(run.happened) > 3, "all cases end alike: the target does not reach what it is to reach"
    for file, error in run.failed:
        raise AssertionError(f"{file}") from error


@pytest.mark.parametrize("target", [each for each in TARGETS if each.unit == "frames"], ids=lambda target: target.name)
@settings(max_examples=25, derandomize=True, suppress_health_check=QUIET)
@given(random=st.randoms(use_true_random=False))
def test_what_fails_is_made_small(target: Target, random: Random) -> None:
    """The same, with hypothesis behind every choice: it shows the shortest case that fails."""
    case = Mutator(random, target.seeds(), target.codec).case()

    async def run() -> None:
        async with target.room() as room:
            with bounded():
                await room.run(case)

    asyncio.run(run())


def test_the_corpus_is_of_targets_that_there_are_and_small() -> None:
    names = {target.name for target in TARGETS}
    assert {folder.name for folder in CORPUS.iterdir()} <= names
    files = list(CORPUS.rglob("*.msgpack"))
    assert max(file.stat().st_size for file in files) < 16 * 1024
    assert sum(file.stat().st_size for file in files) < 512 * 1024
