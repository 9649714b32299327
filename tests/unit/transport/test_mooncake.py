"""``mooncake``: senders that stop while they are read; :mod:`.test_libraries` has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport.backends import backends_for
from tests.unit.transport.crossing import elsewhere, filled, read

pytestmark = pytest.mark.processes

pytest.importorskip("mooncake.engine", reason="scripts/install-transport-extras installs it", exc_type=ImportError)


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
