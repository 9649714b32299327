"""Connections to engines: the verbs by HTTP, tokens and reports by the engine's stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tercet.client import HttpEngine
from tercet.fleet import EngineLoad, Fleet
from tercet.protocol import Engine
from tercet.streams import Listener

Connect = Callable[[str, str], AbstractAsyncContextManager[Engine]]


def connecting(fleet: Fleet, listener: Listener) -> Connect:
    """How to connect to an engine by its name and URL, so that ``fleet`` hears its reports."""

    def connect(name: str, url: str) -> AbstractAsyncContextManager[Engine]:
        def report(load: EngineLoad) -> None:
            fleet.report(name, load)

        return HttpEngine(name, url, listener=listener, on_load=report)

    return connect
