"""The page of a recorded run, whose time stands still, looks as it did: compared with pictures in ``pictures``.

TERCET_TEST_PICTURES=1 writes them; look at them before they are committed.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tercet_lab.bench.simulated import Experiment, Fleet, Record, SyntheticWorkload
from tercet_lab.commands.run_page import RecordedPage

from .chromium import COMMAND, MISSING, chromium
from .page_fleet import served

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 320
"""Pixels of a stored picture's width: enough for what is where and in which colour, too few for single letters."""
MOST_OFF, MOST_DIFFERENT = 4.0, 0.02
"""Of 255, the mean difference of a pixel; and the share of pixels that differ by more than 48."""
AT = 0.45
"""Share of the run that has passed."""
BROWSER = "chromium"

pytestmark = [pytest.mark.processes, pytest.mark.skipif(COMMAND is None, reason=MISSING), pytest.mark.timeout(300)]


def small(png: bytes) -> Image.Image:
    with Image.open(io.BytesIO(png)) as picture:
        return picture.convert("RGB").resize(
            (WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.BOX
        )


def difference(one: Image.Image, other: Image.Image) -> tuple[float, float]:
    """The mean difference, and the share of pixels that differ much; a few rows more or less are cut off."""
    assert abs(one.height - other.height) <= 0.03 * one.height, (one.size, other.size)
    height = min(one.height, other.height)
    first, second = (np.asarray(each.crop((0, 0, WIDTH, height)), dtype=np.float64) for each in (one, other))
    off = np.abs(first - second).max(axis=2)
    return float(off.mean()), float((off > 48).mean())


def version() -> str:
    """The browser's major version."""
    assert COMMAND is not None
    said = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"(\d+)\.", said)
    assert found, said
    return found[1]


def stored(name: str, taken: Image.Image) -> Image.Image:
    """The picture of that name; written first if that is wanted."""
    path = PICTURES / f"{name}.png"
    if os.environ.get("TERCET_TEST_PICTURES"):
        by = PngImagePlugin.PngInfo()
        by.add_text(BROWSER, version())
        taken.quantize(64).save(path, pnginfo=by, optimize=True)
    with Image.open(path) as picture:
        if (made_by := picture.info[BROWSER]) != version():
            pytest.skip(f"the pictures are of Chromium {made_by}, and this is {version()}")
        return picture.convert("RGB")


@pytest.fixture(scope="module")
def run() -> bytes:
    """A run with a seed, in virtual time: the same in every process."""
    simulation = Experiment(
        program="disaggregated",
        fleet=Fleet("2P3D", profile="llama-3.1-8b-h100-tp1"),
        work=SyntheticWorkload(rate=1, requests=150),
        record=Record(frames_every=0.1),
    )
    return simulation.report([25.0], "x").to_json()


@pytest.mark.parametrize(("name", "width", "dark"), [("wide", 1280, False), ("narrow-dark", 360, True)])
async def test_a_recorded_run_looks_as_it_did(run: bytes, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    async with chromium(tmp_path) as tab, served(RecordedPage(run)) as url:
        await tab.open(f"{url}/", width, 900, dark, still=True)
        await tab.until("document.querySelector('#status').innerText === 'recorded run'")
        await tab.js(
            f"(() => {{ const e = document.querySelector('#time'); e.value = e.max * {AT};"
            " e.dispatchEvent(new Event('input', {bubbles: true})) })()"
        )
        await tab.js(
            "document.fonts.ready.then(() => new Promise((go) => setTimeout(go, 600)))"
        )  # bars glide for 0.3 s
        taken = small(await tab.picture())
    mean, different = difference(taken, stored(name, taken))
    if mean > MOST_OFF or different > MOST_DIFFERENT:
        taken.save(tmp_path / f"{name}.png")
        raise AssertionError(f"{name}: {mean:.1f} off, {different:.1%} different; it looks like {tmp_path}/{name}.png")


def test_pictures_that_differ_are_told_apart() -> None:
    with Image.open(PICTURES / "wide.png") as picture:
        wide = picture.convert("RGB")
    assert difference(wide, wide) == (0.0, 0.0)
    moved = Image.new("RGB", wide.size, (255, 255, 255))
    moved.paste(wide, (0, 12))  # as if a line of text came above
    mean, different = difference(wide, moved)
    assert mean > MOST_OFF
    assert different > MOST_DIFFERENT
