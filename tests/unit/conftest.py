"""What unit tests that start processes have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet.settings.process_settings import WARM_PARENT_VARIABLE
from tests.light_parent import EARLY, light_parent


@pytest.fixture(scope="session")
def imported() -> Iterator[Path]:
    """A process that simulated engines and routers are forked from."""
    with light_parent() as address:
        yield address


@pytest.fixture
def forked(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork simulated fleets, and commands of ``tests.simulated_processes``, from a process that has imported Tercet."""
    monkeypatch.setenv(WARM_PARENT_VARIABLE, str(imported))
    for name, value in EARLY.items():
        monkeypatch.setenv(name, value)
