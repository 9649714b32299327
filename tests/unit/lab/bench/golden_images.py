"""Figures against images that somebody has looked at.

``TERCET_GOLDEN=write pytest ...`` writes them anew; look at each before it is committed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tercet_lab import drawing

FOLDER = Path(__file__).parent / "golden"
# Root mean square of the differences of pixels; text that is placed elsewhere is above 5.
TOLERANCE = 3.0
SMALL = 60


def check_image(name: str, draw: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw ``name`` into ``folder``, at few dots per inch, and compare it with the image of that name."""
    compare = pytest.importorskip("matplotlib.testing.compare")
    monkeypatch.setattr(drawing, "DOTS_PER_INCH", SMALL)
    draw(folder / name)
    if os.environ.get("TERCET_GOLDEN") == "write":
        shutil.copyfile(folder / name, FOLDER / name)
    difference = compare.compare_images(str(FOLDER / name), str(folder / name), TOLERANCE)
    assert difference is None, difference
