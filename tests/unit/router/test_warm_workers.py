"""Where the warm parent forks no worker, the worker is one that imports by itself, and the log says why."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tercet.aio.warm_parent import Forks, NoFork
from tercet.router.workers import Place
from tercet.settings import EngineAddress, RouterConfig


class Refusing(Forks):
    def __init__(self) -> None: ...

    async def fork(self, descriptors: Sequence[int]) -> Any:
        raise NoFork("it has 2 Python threads")


async def test_a_worker_that_is_not_forked_imports_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cold = object()

    async def start_cold(self: Place, line: socket.socket) -> Any:
        return cold

    monkeypatch.setattr(Place, "_start_cold", start_cold)
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as loads, caplog.at_level(logging.WARNING, "tercet.router.workers"):
        config = RouterConfig(model="m", engines=(EngineAddress("e", "http://127.0.0.1:1"),))
        place = Place(config, 1, ours, loads.fileno(), tmp_path, asyncio.Event(), Refusing())
        assert await place._start(theirs) is cold  # pyright: ignore[reportPrivateUsage]
    assert "worker 1 imports vLLM itself: it has 2 Python threads" in caplog.text
