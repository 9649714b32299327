"""What counts as progress of a session, and what is had under ``auto``."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tercet.protocol import TransferFailed
from tercet.transport import TransportSettings
from tercet.transport import peer as peer_module
from tercet.transport.backends import backends_for
from tercet.transport.local_rank import LocalRank
from tercet.transport.peer import Leg, TransferPeer
from tercet.transport.peer_messages import Refused
from tercet.transport.region import HeadSlice
from tests.unit.transport.builders import sending_region
from tests.unit.transport.models import whose


def test_an_owed_answer_is_waited_for_while_the_session_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rank = LocalRank(sending_region(), "", TransportSettings(timeout=5.0), ())
    peer = TransferPeer(["tcp://127.0.0.1:1"], rank, lambda _peer: None)
    leg = Leg("ab" * 16, whose(16), HeadSlice(0, 64), lambda _outcome: None)
    assert peer.open(leg)
    leg.finished_at = now[0] - 20
    peer._answered(Refused(leg.number + 1, "another send"))  # pyright: ignore[reportPrivateUsage]
    peer._require_progress()  # pyright: ignore[reportPrivateUsage]
    now[0] += 6
    with pytest.raises(TransferFailed, match="did not acknowledge"):
        peer._require_progress()  # pyright: ignore[reportPrivateUsage]
    peer.close()


def test_auto_goes_on_where_memory_cannot_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("no /proc")

    monkeypatch.setattr(os, "open", fail)
    region = sending_region()
    assert "host" not in [backend.name for backend in backends_for("auto", region)]
    with pytest.raises(OSError, match="no /proc"):
        backends_for("host", region)
