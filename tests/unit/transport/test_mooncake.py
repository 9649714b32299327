"""``mooncake``: senders that stop while they are read, and how it starts; :mod:`.test_libraries` has the rest."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport.backends import BackendUnavailable, backends_for
from tests.unit.transport.crossing import elsewhere, filled, read

pytestmark = pytest.mark.processes

pytest.importorskip("mooncake.engine", reason="scripts/install-transport-extras installs it", exc_type=ImportError)
LAYERS, BLOCKS, BYTES = 3, 40, 24 * 1024
SCATTERED = ((31, 2, 17, 3, 38), (5, 39, 0, 22, 21))
ADJACENT = (tuple(range(4, 20)), tuple(range(11, 27)))


def test_nothing_is_written_once_a_stopped_sender_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    size, blocks = 1 << 20, 64
    region = filled(1, blocks, size, 1)
    (backend,) = backends_for("mooncake", region)
    with elsewhere("mooncake", blocks, size) as process:
        reader = backend.connect(process.offer, process.sender)
        read(reader, np.array([(size, 0, 0)]))
        process.stop()
        with pytest.raises(TransferFailed, match="mooncake"):
            read(reader, np.array([(size, block * size, block * size) for block in range(blocks)]))
        region.blocks(0, 0, blocks)[:] = b"\1" * (size * blocks)
        process.go_on()
        read(reader, np.array([(8, 0, size)]))  # a new engine reads after whatever the old one would have
        assert region.blocks(0, 2, blocks - 2) == b"\1" * (size * (blocks - 2))
        reader.close()
    backend.close()
    region.close()


def test_memory_that_was_not_registered_cannot_be_read() -> None:
    region = filled(1, 8, BYTES, 1)
    (backend,) = backends_for("mooncake", region)
    with elsewhere("mooncake", 8, BYTES) as process:
        reader = backend.connect(process.offer, process.sender)
        with pytest.raises(TransferFailed, match="mooncake"):
            read(reader, np.array([(BYTES, process.shape.size + (1 << 20), 0)]))
        reader.close()
    backend.close()
    region.close()


def test_closing_gives_files_and_threads_back() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use() -> None:
        region = filled(1, 8, BYTES, 1)
        (backend,) = backends_for("mooncake", region)
        with elsewhere("mooncake", 8, BYTES) as process:
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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    with pytest.raises(BackendUnavailable, match=r"mooncake: .*scripts/install-transport-extras"):
        backends_for("mooncake", region)
    assert [backend.name for backend in backends_for("auto", region)] == ["host", "tcp"]
    assert "auto continues without mooncake" in caplog.text
    region.close()
