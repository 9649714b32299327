"""Sends of blocks that nobody has pinned: what is rewritten before its receiver has looked is never taken for KV."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import TransferFailed
from tercet.transport import CORE_WORDS, CoreWords, KVRegion, RankTransport, SendReport, TransportSettings, core_word
from tercet.transport.backends import reading, tcp
from tercet.transport.peer import send_numbers
from tercet.transport.region import WORDS, is_core_word
from tests.unit.transport.ranks import (
    TOKENS,
    Held,
    Send,
    content,
    expected_after,
    filled,
    grant,
    idle,
    new_lease,
    rank,
    transfer,
    whole,
)

pytestmark = pytest.mark.slow

KIB = 1024
LAYERS, BLOCKS, BYTES = 4, 16, 256 * KIB
SOURCES, TARGETS = (3, 4, 9, 1), (2, 5, 6, 7)
BACKENDS = ["host", "tcp"]
EPOCH = 12


class Core:
    """What an engine's core does: it vouches for blocks, and rewrites them once it no longer does."""

    def __init__(self, region: KVRegion) -> None:
        self._region = region
        self._words = CoreWords(f"/proc/self/fd/{region.fd}", region.shape.words)
        self.epoch = EPOCH
        self._words.advance(EPOCH)

    def go_on(self) -> None:
        """Hand all blocks out, and have them written."""
        self.epoch += 1
        self._words.advance(self.epoch)
        for layer in range(LAYERS):
            self._region.blocks(layer, 0, BLOCKS)[:] = b"\xee" * (BLOCKS * BYTES)


def send(sender: RankTransport, source: KVRegion, receiver: RankTransport, lease: str, word: int) -> Send:
    found = Send(sender, receiver.addresses, lease, whole(source), word=word)
    found.push(range(LAYERS), SOURCES)
    found.finish(len(TARGETS) * TOKENS)
    return found


@pytest.fixture(params=BACKENDS)
def settings(request: pytest.FixtureRequest) -> TransportSettings:
    return TransportSettings(request.param)


def test_blocks_that_stand_arrive(settings: TransportSettings) -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    held, before = Held(source, target), content(target)
    with rank(source, settings) as sender, rank(target, settings) as receiver:
        Core(source)
        for index in range(3):
            lease = grant(receiver, TARGETS)
            assert isinstance(send(sender, source, receiver, lease, core_word(EPOCH, index)).wait(), SendReport)
            assert receiver.grants.revoke(lease) == len(TARGETS) * TOKENS
        assert content(target) == expected_after(before, source, SOURCES, TARGETS)
        assert source.has_word(core_word(EPOCH, 0)), "the core's words are not the transport's to clear"
        transfer(sender, source, receiver, SOURCES, TARGETS)
        idle(sender, receiver)
    held.require_back()


def test_a_core_that_went_on_before_is_asked(settings: TransportSettings) -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before = content(target)
    with rank(source, settings) as sender, rank(target, settings) as receiver:
        core = Core(source)
        core.go_on()
        lease = grant(receiver, TARGETS)
        outcome = send(sender, source, receiver, lease, core_word(EPOCH, 0)).wait()
        assert isinstance(outcome, TransferFailed)
        assert "is no longer stuck" in outcome.message
        assert receiver.grants.revoke(lease) == 0
        assert content(target) == before


class Interrupted:
    """Counts the steps in which KV is copied, and lets the core go on before or after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, at: int, before: bool) -> None:
        self.steps = 0
        self.go_on: Callable[[], None] = lambda: None
        self._at, self._before, self._lock = at, before, threading.Lock()
        owner, name = {"host": (reading.HostReader, "_copy"), "tcp": (tcp, "send_all")}[backend]
        copy: Callable[..., Any] = getattr(owner, name)

        def interrupted(*args: Any) -> Any:
            with self._lock:
                number, self.steps = self.steps, self.steps + 1
            if number == self._at and self._before:
                self.go_on()
            found = copy(*args)
            if number == self._at and not self._before:
                self.go_on()
            return found

        monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("at", [0, 1, 3, 10])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_core_that_goes_on_at_any_step_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch, backend: str, at: int, before: bool
) -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    settings = TransportSettings(backend)
    was = [[bytes(source.blocks(layer, block)) for block in SOURCES] for layer in range(LAYERS)]
    interrupted = Interrupted(monkeypatch, backend, at, before)
    with rank(source, settings) as sender, rank(target, settings) as receiver:
        core = Core(source)
        interrupted.go_on = core.go_on
        lease = grant(receiver, TARGETS)
        outcome = send(sender, source, receiver, lease, core_word(EPOCH, 0)).wait()
        valid = receiver.grants.revoke(lease)
        assert valid is not None
        whole_blocks = valid // TOKENS
        now = [[bytes(target.blocks(layer, block)) for block in TARGETS[:whole_blocks]] for layer in range(LAYERS)]
        assert now == [blocks[:whole_blocks] for blocks in was], "what counts as valid is as it was"
        if core.epoch == EPOCH:  # it is copied in fewer steps
            assert isinstance(outcome, SendReport)
        else:
            assert isinstance(outcome, TransferFailed)
            assert valid < len(TARGETS) * TOKENS
        # The session is as good as before.
        transfer(sender, source, receiver, SOURCES, TARGETS)
        idle(sender, receiver)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_core_that_goes_on_at_random_moments(backend: str) -> None:
    """Threads of both sides run freely; whatever is acknowledged is what the core vouched for."""
    choose, settings = random.Random(backend), TransportSettings(backend)
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    original = content(source)
    acknowledged = 0
    with rank(source, settings) as sender, rank(target, settings) as receiver:
        core = Core(source)
        for _ in range(40):
            for layer in range(LAYERS):
                source.blocks(layer, 0, BLOCKS)[:] = original[layer]
            was = [[bytes(source.blocks(layer, block)) for block in SOURCES] for layer in range(LAYERS)]
            lease = grant(receiver, TARGETS)
            timer = threading.Timer(choose.uniform(0, 0.006), core.go_on)
            word = core_word(core.epoch, 0)
            timer.start()
            outcome = send(sender, source, receiver, lease, word).wait()
            done = isinstance(outcome, SendReport)
            timer.join()
            valid = receiver.grants.revoke(lease)
            assert valid is not None
            assert (valid == len(TARGETS) * TOKENS) == done
            for layer in range(LAYERS):
                for slot in range(valid // TOKENS):
                    assert bytes(target.blocks(layer, TARGETS[slot])) == was[layer][slot]
            acknowledged += done
        print(f"{backend}: {acknowledged} of 40 acknowledged")


def test_a_cancelled_send_leaves_the_words_to_the_core() -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    with rank(source) as sender, rank(target) as receiver:
        Core(source)
        found = Send(sender, receiver.addresses, grant(receiver, TARGETS), whole(source), word=core_word(EPOCH, 7))
        found.cancel()
        assert isinstance(found.wait(), TransferFailed)
        assert source.has_word(core_word(EPOCH, 7))


def test_only_a_word_of_the_cores_vouches_for_anything() -> None:
    source = filled(LAYERS, BLOCKS, BYTES, 1)
    with rank(source) as sender:
        ordinary = next(send_numbers)
        source.set_word(ordinary)
        found = Send(sender, ("127.0.0.1:1",), new_lease(), whole(source), word=ordinary)
        assert isinstance(found.wait(), TransferFailed)


@given(st.integers(0, 2**48), st.integers(0, CORE_WORDS - 1))
def test_numbers_of_the_cores_words_are_nobody_elses(epoch: int, index: int) -> None:
    assert is_core_word(core_word(epoch, index))
    assert 0 <= core_word(epoch, index) < 2**63
    assert core_word(epoch, index) != core_word(epoch + 1, index)


def test_ordinary_sends_pass_the_cores_words_by() -> None:
    numbers: Iterator[int] = (next(send_numbers) for _ in count())
    some = [next(numbers) for _ in range(2 * WORDS)]
    assert not any(map(is_core_word, some))
    assert some == sorted(set(some))
