"""The manual's site in headless Chromium: at every width all text is inside the window, or in a box that scrolls."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.router.page.chromium import COMMAND, MISSING, chromium

pytestmark = [pytest.mark.processes, pytest.mark.skipif(COMMAND is None, reason=MISSING)]

PAGES = ("README", "design", "measurements", "reference/settings")
WIDTHS = (320, 360, 768, 1024, 1200, 1366, 1440, 1600, 1920, 2560)
# The width that the page takes, and texts of which a part is outside of the window and of any box that scrolls.
OUTSIDE = """(() => {
  const width = document.documentElement.clientWidth, outside = [];
  const scrolls = node => {
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return true;
    return false;
  };
  const texts = document.createTreeWalker(document.querySelector(".content"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    const boxes = [...range.getClientRects()].filter(box => box.width > 0 && texts.currentNode.data.trim());
    if (boxes.some(box => box.right > width + 1 || box.left < -1) && !scrolls(texts.currentNode))
      outside.push(texts.currentNode.data.trim().slice(0, 60));
  }
  return [document.documentElement.scrollWidth, outside];
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built from the sources."""
    folder, docs = tmp_path_factory.mktemp("site"), Path(__file__).parents[3] / "docs"
    built = subprocess.run([sys.executable, "-m", "sphinx", "--quiet", docs, folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.timeout(590)
async def test_nothing_is_outside_of_the_window(site: str, tmp_path: Path) -> None:
    async with chromium(tmp_path) as tab:
        for page in PAGES:
            await tab.open(f"{site}/{page}.html", still=True)
            for width in WIDTHS:
                await tab.size(width, 900)
                taken, outside = await tab.js(OUTSIDE)
                assert (taken <= width, outside) == (True, []), f"{page} at {width} px takes {taken} px"
