"""Headless Chromium for tests of the page: started, asked over its DevTools connection, and ended."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMAND = next((found for name in NAMES if (found := shutil.which(name))), None)
MISSING = f"no Chromium on this machine (one of {', '.join(NAMES)}); Debian's package is chromium"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
    "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


class Tab:
    """One page of the browser. ``problems`` are what it has written to its console as an error, and failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._motion = "no-preference"
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])
            elif said["method"] == "Network.requestWillBeSent":
                self.urls.append(said["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(60):
            said = await answer
        assert "error" not in said, said
        return said["result"]

    async def open(
        self, url: str, width: int = 1280, height: int = 900, dark: bool = False, still: bool = False
    ) -> None:
        """Load a page; a ``still`` one is for people who want no motion."""
        self._motion = "reduce" if still else "no-preference"
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.size(width, height, dark)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.protocol === 'http:'")

    async def size(self, width: int, height: int, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": self._motion}
        await self.call("Emulation.setEmulatedMedia", features=[scheme, motion])

    async def js(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Return the value once it is true."""
        async with asyncio.timeout(60):
            while not (found := await self.js(expression)):
                await asyncio.sleep(0.05)
        return found

    async def text(self, selector: str) -> str:
        return await self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    async def click(self, selector: str) -> None:
        """As a person does: in the middle of what is on the screen."""
        place = f"document.querySelector({json.dumps(selector)})"
        await self.js(f"{place}.scrollIntoView({{block: 'center'}})")
        box = await self.js(
            f"(() => {{ const b = {place}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def picture(self, path: Path | None = None, whole: bool = True) -> bytes:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        data = base64.b64decode(found["data"])
        if path is not None:
            path.write_bytes(data)
        return data


@asynccontextmanager
async def chromium(folder: Path) -> AsyncGenerator[Tab]:
    """A tab of a new browser, whose files are in ``folder``."""
    assert COMMAND is not None, MISSING
    process = await asyncio.create_subprocess_exec(
        COMMAND, *FLAGS, f"--user-data-dir={folder}", "about:blank", start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        told = folder / "DevToolsActivePort"
        async with asyncio.timeout(90):
            while not (told.exists() and told.read_text().count("\n")):
                assert process.returncode is None, "Chromium has ended"
                await asyncio.sleep(0.05)
        port = int(told.read_text().splitlines()[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
