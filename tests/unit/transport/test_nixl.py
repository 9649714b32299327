"""``nixl``: senders that stop while they are read; :mod:`.test_libraries` has the rest."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport.backends import backends_for, nixl
from tests.unit.transport.crossing import elsewhere, filled, read

pytestmark = pytest.mark.processes

pytest.importorskip("nixl", reason="scripts/install-transport-extras installs it", exc_type=ImportError)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "READ_SECONDS", 2.0)


def test_nothing_is_written_once_a_stopped_sender_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # through shared memory a stopped process can be read
    size, blocks = 1 << 20, 64
    region = filled(1, blocks, size, 1)
    (backend,) = backends_for("nixl", region)
    with elsewhere("nixl", blocks, size) as process:
        reader = backend.connect(process.offer, process.sender)
        read(reader, np.array([(size, 0, 0)]))
        process.stop()
        with pytest.raises(TransferFailed, match="was not read within"):
            read(reader, np.array([(size, block * size, block * size) for block in range(blocks)]))
        region.blocks(0, 0, blocks)[:] = b"\1" * (size * blocks)
        process.go_on()
        with suppress(TransferFailed):  # the sender may be gone
            assert isinstance(reader, nixl.NixlReader)
            reader.word(0)  # an agent that still had the old reads would do them now
        reader.close()
        assert region.blocks(0, 0, blocks) == b"\1" * (size * blocks)
    backend.close()
    region.close()
