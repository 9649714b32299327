"""Signals that ask a process to end: the first kindly, the second at once; what was ignored stays so."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator

import pytest

from tercet.aio.tasks import signals_to


@pytest.fixture(autouse=True)
def as_before() -> Generator[None]:
    """Whatever handles them here handles them again afterwards."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.02)


async def test_the_first_and_the_second_are_calls_and_others_change_nothing() -> None:
    calls = list[str]()
    with signals_to(lambda: calls.append("first"), lambda: calls.append("second")) as asked:
        await send(signal.SIGTERM)
        assert calls == ["first"]
        await send(signal.SIGINT)
        await send(signal.SIGHUP)
    assert calls == ["first", "second"]
    assert asked == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_what_nohup_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_to(lambda: None, lambda: None) as asked:
        await send(signal.SIGHUP)
        assert asked == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
