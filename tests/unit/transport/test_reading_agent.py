"""What reads over NIXL is gone once a failure is told, however long the error is kept: NIXL cannot be told to stop."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from tercet.protocol import TransferFailed
from tercet.transport.backends import nixl
from tercet.transport.backends.nixl import ReadingAgent, pieces


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
