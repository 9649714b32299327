"""``nixl`` and ``mooncake``: KV between ranks byte for byte, lost senders, closing, and a missing package."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport import HeadSlice, SendReport
from tercet.transport.backends import BackendUnavailable, backends_for, nixl
from tercet.transport.backends.nixl import ReadingAgent, pieces
from tests.unit.transport.crossing import TOKENS, elsewhere, filled, rank, read, send
from tests.unit.transport.models import a_grant
from tests.unit.transport.ranks import transport_to

pytestmark = [pytest.mark.processes, pytest.mark.verifies("KV blocks", transport="{library}", vllm=False)]

MODULES = {"nixl": "nixl", "mooncake": "mooncake.engine"}
LAYERS, BLOCKS, BYTES = 3, 40, 24 * 1024
SCATTERED = ((31, 2, 17, 3, 38), (5, 39, 0, 22, 21))
ADJACENT = (tuple(range(4, 20)), tuple(range(11, 27)))


@pytest.fixture(params=MODULES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    pytest.importorskip(MODULES[name], reason="scripts/install-transport-extras installs it", exc_type=ImportError)
    monkeypatch.setattr(nixl, "READ_SECONDS", 2.0)
    return name


@pytest.mark.parametrize(("sources", "targets"), [SCATTERED, ADJACENT], ids=["scattered", "adjacent"])
def test_blocks_arrive_byte_for_byte_and_nothing_else_changes(
    library: str, sources: Sequence[int], targets: Sequence[int]
) -> None:
    ours, theirs = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before = [bytes(theirs.blocks(layer, 0, BLOCKS)) for layer in range(LAYERS)]
    with rank(library, ours) as sender, rank(library, theirs) as receiver:
        report = send(sender, receiver, LAYERS, sources, targets, HeadSlice(0, BYTES))
        assert isinstance(report, SendReport)
        assert transport_to(sender, receiver.addresses) == library
        assert receiver.counters()["chunks_received"] == report.chunks == 1
        for layer in range(LAYERS):
            expected = bytearray(before[layer])
            for source, target in zip(sources, targets, strict=True):
                expected[target * BYTES : (target + 1) * BYTES] = ours.blocks(layer, source)
            assert theirs.blocks(layer, 0, BLOCKS) == expected


def test_one_rank_sends_each_of_two_its_half_of_every_block(library: str) -> None:
    whole, half = filled(LAYERS, BLOCKS, BYTES, 1), BYTES // 2
    sources, targets = SCATTERED
    with rank(library, whole) as sender:
        for number in range(2):
            part = filled(LAYERS, BLOCKS, half, 2 + number)
            with rank(library, part) as receiver:
                head_slice = HeadSlice(number * half, half)
                assert isinstance(send(sender, receiver, LAYERS, sources, targets, head_slice), SendReport)
                for layer in range(LAYERS):
                    for source, target in zip(sources, targets, strict=True):
                        cut = whole.blocks(layer, source)[number * half : (number + 1) * half]
                        assert part.blocks(layer, target) == cut


def test_two_ranks_fill_a_half_of_every_block_of_one(library: str) -> None:
    half = BYTES // 2
    whole, parts = filled(LAYERS, BLOCKS, BYTES, 1), [filled(LAYERS, BLOCKS, half, 2 + number) for number in range(2)]
    sources, targets = SCATTERED
    end, lease = len(targets) * TOKENS, "0" * 32
    with rank(library, whole) as receiver:
        receiver.grants.grant(a_grant(lease, targets, 0, end, TOKENS))
        for number, part in enumerate(parts):
            with rank(library, part) as sender:
                head_slice = HeadSlice(0, half, number, 2)
                assert isinstance(send(sender, receiver, LAYERS, sources, targets, head_slice, lease), SendReport)
                for layer in range(LAYERS):
                    for source, target in zip(sources, targets, strict=True):
                        cut = whole.blocks(layer, target)[number * half : (number + 1) * half]
                        assert cut == part.blocks(layer, source)
        assert receiver.grants.revoke(lease) == end


def test_without_a_lease_nothing_is_written(library: str) -> None:
    ours, theirs = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    with rank(library, ours) as sender, rank(library, theirs) as receiver:
        before = bytes(theirs.blocks(0, 0, BLOCKS))
        outcome = send(sender, receiver, LAYERS, *SCATTERED, HeadSlice(0, BYTES), lease="0" * 32)
        assert isinstance(outcome, TransferFailed)
        assert theirs.blocks(0, 0, BLOCKS) == before


def test_a_killed_sender_is_an_error_and_another_can_be_read(library: str) -> None:
    region = filled(1, 8, BYTES, 1)
    (backend,) = backends_for(library, region)
    copy = (BYTES, 0, BYTES)
    with elsewhere(library, 8, BYTES) as lost, elsewhere(library, 8, BYTES) as kept:
        reader, other = backend.connect(lost.offer, lost.sender), backend.connect(kept.offer, kept.sender)
        read(reader, np.array([copy]))
        assert region.blocks(0, 1) == b"\7" * BYTES
        lost.kill()
        with pytest.raises(TransferFailed, match=library):
            read(reader, np.array([copy]))
        read(other, np.array([(BYTES, 0, 2 * BYTES)]))
        assert region.blocks(0, 2) == b"\7" * BYTES
        reader.close()
        other.close()
    backend.close()
    region.close()


def test_memory_that_was_not_registered_cannot_be_read(library: str) -> None:
    region = filled(1, 8, BYTES, 1)
    (backend,) = backends_for(library, region)
    with elsewhere(library, 8, BYTES) as process:
        reader = backend.connect(process.offer, process.sender)
        with pytest.raises(TransferFailed, match=library):
            read(reader, np.array([(BYTES, process.shape.size + (1 << 20), 0)]))
        reader.close()
    backend.close()
    region.close()


def test_closing_gives_files_and_threads_back(library: str) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use() -> None:
        region = filled(1, 8, BYTES, 1)
        (backend,) = backends_for(library, region)
        with elsewhere(library, 8, BYTES) as process:
            reader = backend.connect(process.offer, process.sender)
            read(reader, np.array([(BYTES, 0, 0)]))
            reader.close()
        backend.close()
        region.close()

    use()  # what the library keeps for good
    before = held()
    use()
    assert held() <= before


def test_without_the_package_it_says_what_to_do_and_auto_goes_on(
    library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tercet")
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] in ("nixl", "mooncake"):
            raise ImportError(f"no module named {name}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    monkeypatch.setattr("tercet.transport.backends.has_rdma", lambda: True)
    region = filled(1, 8, BYTES, 1)
    with pytest.raises(BackendUnavailable, match=rf"{library}: .*scripts/install-transport-extras"):
        backends_for(library, region)
    assert [backend.name for backend in backends_for("auto", region)] == ["host", "tcp"]
    assert f"auto continues without {library}" in caplog.text
    region.close()


# What reads over NIXL is gone once a failure is told, however long the error is kept: NIXL cannot be told to stop.


@pytest.mark.parametrize("kind", [TransferFailed, RuntimeError])
def test_the_agent_of_a_failed_read_is_gone_while_its_error_is_there(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Agent:
        def __init__(self, *_: object, **__: object) -> None:
            made.append(weakref.ref(self))

        def connect(self, _: bytes) -> str:
            return "sender"

        def read(self, *_: object) -> None:
            raise kind("it does not come")

    monkeypatch.setattr(nixl, "NixlAgent", Agent)
    reading, none = ReadingAgent(None, [], b""), pieces(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    with pytest.raises(TransferFailed, match="it does not come") as failed:
        reading.read(none, none)
    assert failed.value.__traceback__ is not None
    assert [each() for each in made] == [None]


def test_nothing_is_written_once_a_stopped_sender_was_given_up(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # through shared memory a stopped process can be read
    size, blocks = 1 << 20, 64
    region = filled(1, blocks, size, 1)
    (backend,) = backends_for(library, region)
    with elsewhere(library, blocks, size) as process:
        reader = backend.connect(process.offer, process.sender)
        read(reader, np.array([(size, 0, 0)]))
        process.stop()
        with pytest.raises(TransferFailed, match={"nixl": "was not read within", "mooncake": "mooncake"}[library]):
            read(reader, np.array([(size, block * size, block * size) for block in range(blocks)]))
        region.blocks(0, 0, blocks)[:] = b"\1" * (size * blocks)
        process.go_on()
        untouched = 0
        if isinstance(reader, nixl.NixlReader):
            with suppress(TransferFailed):  # the sender may be gone
                reader.word(0)  # an agent that still had the old reads would do them now
        else:
            untouched = 2
            read(reader, np.array([(8, 0, size)]))  # a new engine reads after whatever the old one would have
            assert region.blocks(0, untouched, blocks - untouched) == b"\1" * (size * (blocks - untouched))
        reader.close()
        assert region.blocks(0, untouched, blocks - untouched) == b"\1" * (size * (blocks - untouched))
    backend.close()
    region.close()
