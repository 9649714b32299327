"""A clock that is wrong for one process, and right for all others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tercet_checks.chaos.real_fleet import WrongClock, build, can_be_built

SHOW = "import time; print(time.time(), time.monotonic())"


@pytest.mark.skipif(not can_be_built(), reason="no C compiler")
def test_the_wall_clock_steps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    with WrongClock(build(tmp_path), tmp_path / "offset") as clock:
        for step in (0.0, -3600.0, 7200.0):
            clock.step(step)
            command = [sys.executable, "-c", SHOW]
            told = subprocess.run(command, env={**os.environ, **clock.env}, capture_output=True, check=True).stdout
            wall, monotonic = map(float, told.split())
            assert abs(wall - time.time() - step) < 100
            assert abs(monotonic - time.monotonic()) < 100
