"""Engines that stop, for a while or for good, and that are killed, while clients read: the answers are the same.

Whoever is stopped may be an engine as a whole, or one process of it alone.
"""

from __future__ import annotations

import asyncio
import signal
from functools import partial

import psutil
import pytest

from tercet.wire.client import HttpEngine
from tercet_checks.chaos.chaos_report import ProcessKind
from tests import longest_wait
from tests.long_runs import in_full

from .client_streams import BODIES, Answer, Readers, read, read_all
from .conftest import Fleet, get_json, settled
from .processes import part_of, send_signal

pytestmark = pytest.mark.verifies("failures of engines")

SECONDS = 240
LONG = in_full("decode-0 as a whole and its worker; a stopped core in test_bypass, an agent in test_stopped_agent")
LONGEST_GAP = 10
"""What clients are promised while one engine is left that answers."""


@pytest.fixture(scope="module")
def calm(breakable: Fleet) -> list[Answer]:
    """What the router answers while all is well."""
    return asyncio.run(read_all(breakable.url))


until = partial(longest_wait.until, seconds=SECONDS, every=0.2)


async def all_is_back(fleet: Fleet, *names: str) -> None:
    """These engines are picked again, and neither they nor the router hold anything for anybody."""
    await until(lambda: all(fleet.engine(name)["reachable"] for name in names))
    await until(lambda: not get_json(f"{fleet.url}/tercet/v1/sequences"))
    assert {engine["in_flight"] for engine in get_json(f"{fleet.url}/tercet/v1/engines")} == {0}
    for name in names:
        async with HttpEngine(name, fleet.places[name].url) as client:
            await settled(client, 60)


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("decode-0", "engine"),
        ("decode-0", "worker"),
        pytest.param("decode-0", "api", marks=LONG),
        pytest.param("decode-0", "core", marks=LONG),
        pytest.param("decode-0", "agent", marks=LONG),
        pytest.param("prefill-0", "engine", marks=LONG),
    ],
)
async def test_streams_survive_an_engine_that_stands_still(
    breakable: Fleet, calm: list[Answer], which: ProcessKind, name: str
) -> None:
    stopped = part_of(breakable.places[name].url, which)
    readers = Readers(breakable.url, calm)
    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            readers.start(group)
            await readers.more(5)
            send_signal(stopped, signal.SIGSTOP)
            readers.over = True  # what is under way is read to its end
        async with asyncio.timeout(SECONDS):
            later = await read(breakable.url, BODIES[0])
    finally:
        send_signal(stopped, signal.SIGCONT)
    print(f"{name}, its {which} stopped: the longest gap of a stream {readers.gap:.1f} s")
    assert readers.answers >= len(BODIES)
    assert readers.gap < LONGEST_GAP
    assert later == calm[0], "what comes meanwhile is served by the others"
    await all_is_back(breakable, *breakable.places)


async def test_one_stopped_for_a_while_one_killed_and_one_stopped_for_good(
    breakable: Fleet, calm: list[Answer]
) -> None:
    """At each moment one of the three is left: the second while the first stands still, then the first again."""
    assert await read_all(breakable.places["prefill-0"].url) == calm, "what one engine alone answers"
    waking, killed, stopped = (
        part_of(breakable.places[name].url, "engine") for name in ("decode-1", "decode-0", "prefill-0")
    )
    readers = Readers(breakable.url, calm)

    def said(event: str) -> None:
        print(f"{event}: {readers.answers} answers; gaps of up to {readers.gap:.1f} s; "
              f"up to {readers.first:.1f} s to the first token")  # fmt: skip

    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            readers.start(group)
            await readers.more(5)
            send_signal(waking, signal.SIGSTOP)
            await until(lambda: not breakable.engine("decode-1")["reachable"])
            await readers.more(10)
            said("decode-1 stopped")
            send_signal(killed, signal.SIGKILL)
            await readers.more(10)
            said("decode-0 killed meanwhile")
            assert waking[0].status() == psutil.STATUS_STOPPED, "two were gone at once"
            send_signal(waking, signal.SIGCONT)
            await until(lambda: breakable.engine("decode-1")["in_flight"])
            await readers.more(10)
            said("decode-1 goes on")
            send_signal(stopped, signal.SIGSTOP)
            await readers.more(10)
            said("prefill-0 stopped for good")
            readers.over = True
        async with asyncio.timeout(SECONDS):
            assert await read(breakable.url, BODIES[0]) == calm[0], "what comes later is served by who is left"
        await all_is_back(breakable, "decode-1")
        assert [breakable.engine(name)["reachable"] for name in ("decode-0", "prefill-0")] == [False, False]
    finally:
        send_signal([*waking, *stopped], signal.SIGCONT)
    said("at the end")
    assert readers.gap < LONGEST_GAP
    await all_is_back(breakable, "decode-1", "prefill-0")
