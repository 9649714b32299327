"""The metrics of one test in the registry that a process has."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

# The names of the HTTP metrics of vLLM's applications begin so.
HTTP = "http_"


@contextmanager
def own_metrics() -> Generator[None]:
    """Leave the collectors of the process as they were, also when what is inside fails.

    While the context is open, the HTTP metrics of applications that were built before are not registered: vLLM's layers
    count no requests of an application whose metrics have the names of registered ones.
    """
    names = REGISTRY._collector_to_names
    before = set[Collector](names)
    aside = [collector for collector in before if any(name.startswith(HTTP) for name in names[collector])]
    for collector in aside:
        REGISTRY.unregister(collector)
    try:
        yield
    finally:
        for collector in set[Collector](names) - before:
            REGISTRY.unregister(collector)
        for collector in aside:
            REGISTRY.register(collector)
