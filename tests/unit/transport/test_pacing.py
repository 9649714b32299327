"""How fast a limited receiver takes KV in."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport import TransportSettings, inbound
from tercet.transport.inbound import BURST_SECONDS, Pace
from tests.unit.transport.ranks import filled, rank, transfer

LIMIT = 1000.0


class Clock:
    """Time that passes while somebody sleeps, a little longer than asked for, or idles."""

    def __init__(self, oversleep: float) -> None:
        self.now, self.slept, self._oversleep = 100.0, 0.0, oversleep

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += seconds
        self.now += seconds + self._oversleep


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from([0.0, 0.001, 1.0])), min_size=1), st.sampled_from([0, 1e-4])
)
def test_no_more_than_the_limit_and_no_wait_for_nothing(steps: list[tuple[int, float]], oversleep: float) -> None:
    clock, pace = Clock(oversleep), Pace(LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbound, "time", clock)
        patch.setattr(pace, "_over", clock)
        taken, idle = 0, 0.0
        for nbytes, pause in steps:
            pace.took(nbytes)
            taken, idle = taken + nbytes, idle + pause
            # What it took in since the start has had its time, but for one burst.
            assert taken <= LIMIT * (clock.now - 100.0 + BURST_SECONDS) + 1e-6
            clock.now += pause
        assert clock.slept <= taken / LIMIT


def test_without_a_limit_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "time", None)
    Pace().took(10**15)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["host", "tcp"])
def test_a_limited_receiver_takes_its_time(backend: str) -> None:
    limit, layers, size = 4e6, 5, 16 * 1024
    limited = TransportSettings(backend, receive_limit=limit)
    ours, theirs = filled(layers, 40, size, 1), filled(layers, 40, size, 2)
    with rank(ours, TransportSettings(backend)) as sender, rank(theirs, limited) as receiver:
        began = time.monotonic()
        report = transfer(sender, ours, receiver, range(20), range(20, 40))
        assert time.monotonic() - began >= report.bytes / limit - BURST_SECONDS


def test_closing_ends_the_wait_of_whoever_took_too_much() -> None:
    pace = Pace(1.0)
    taking = threading.Thread(target=pace.took, args=(10**6,))
    taking.start()
    pace.close()
    taking.join(60)
    assert not taking.is_alive()
