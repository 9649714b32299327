"""Take pictures of the page of simulated engines under load, in Chromium: docs/figures/page.png by default.

    python -m scripts.page_picture
    python -m scripts.page_picture --engines 50 --width 360 768 1200 1920 --themes light dark --to /tmp/page

With several widths or themes, ``--to`` names the beginning of the files: ``/tmp/page-360-dark.png``.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import tempfile
from pathlib import Path

from PIL import Image
from tests.unit.router.page.chromium import chromium
from tests.unit.router.page.page_fleet import page_fleet, served

from tercet.router.observe.metrics import Metrics

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "page.png"
HEIGHT = 900
# The page follows a change of its size with the next frames.
SETTLE_SECONDS = 1.5


async def take(engines: int, rate: float, seconds: float, pictures: dict[Path, tuple[int, bool]]) -> None:
    """Take these pictures, each of a width and perhaps dark, after ``seconds`` of load."""
    async with page_fleet(engines, Metrics()) as fleet, served(fleet.app) as url, asyncio.TaskGroup() as load:
        fleet.history.begin()
        running = [load.create_task(each) for each in (fleet.deliver(), fleet.load(rate), fleet.move_some(0.7))]
        with tempfile.TemporaryDirectory(prefix="page-picture-") as folder:
            async with chromium(Path(folder)) as tab:
                await tab.open(f"{url}/tercet")
                await asyncio.sleep(seconds)
                for path, (width, dark) in pictures.items():
                    await tab.size(width, HEIGHT, dark)
                    await asyncio.sleep(SETTLE_SECONDS)
                    _save(await tab.picture(), path)
                    print(path)
                for problem in tab.problems:
                    print(f"the browser's console: {problem}")
        for task in running:
            task.cancel()


def _save(png: bytes, path: Path) -> None:
    """Write a picture with 256 colours, half of its size: pictures are kept in git."""
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)


def main() -> None:
    """Take the pictures of the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.page_picture", description=__doc__)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=40, help="of load, before the first picture")
    parser.add_argument("--width", type=int, nargs="+", default=[1280])
    parser.add_argument("--themes", choices=("light", "dark"), nargs="+", default=["light"])
    parser.add_argument("--to", type=Path, default=PICTURE)
    given = parser.parse_args()
    wanted = list(itertools.product(given.width, given.themes))
    several = len(wanted) > 1
    pictures = {
        given.to.with_name(f"{given.to.stem}-{width}-{theme}.png") if several else given.to: (width, theme == "dark")
        for width, theme in wanted
    }
    asyncio.run(take(given.engines, given.rate, given.seconds, pictures))


if __name__ == "__main__":
    main()
