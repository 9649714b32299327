"""What an engine's core says of vLLM's pauses and sleep."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.interface import PauseState

from .tiny_engine import TinyEngine


@pytest.mark.parametrize(
    ("state", "paused"), [(PauseState.UNPAUSED, ""), (PauseState.PAUSED_NEW, "new"), (PauseState.PAUSED_ALL, "all")]
)
def test_the_status_tells_what_is_paused(engine: TinyEngine, state: PauseState, paused: str) -> None:
    engine.core.scheduler.set_pause_state(state)
    assert engine.status()["paused"] == paused
    engine.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.status()["paused"] == ""


def test_a_sleeping_engine_is_paused(engine: TinyEngine) -> None:
    engine.core.model_executor.is_sleeping = True
    assert engine.status()["paused"] == "all"
