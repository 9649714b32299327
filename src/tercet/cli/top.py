"""``tercet top``: show the fleet of a running router in a terminal, once a second."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from tercet.cli.flag_records import flags_as_records
from tercet.cli.fleet_view import FleetView, drawn
from tercet.cli.router_calls import RunningRouter, understood
from tercet.cli.terminal import console, printable
from tercet.protocol import TercetError

# Intervals in seconds: between two calls of the router, and between two checks for keys.
EVERY, KEYS_EVERY = 1.0, 0.1
ALL_LINES = 1_000_000


class Latest:
    """The router's latest status, polled once a second on another thread; ``trouble`` is the error of the last poll."""

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look
        self._ended = threading.Event()
        self.status = look()
        self.trouble = ""
        self.number = 0
        threading.Thread(target=self._follow, name="top", daemon=True).start()

    def _follow(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self.status, self.trouble = self._look(), ""
            except TercetError as error:
                self.trouble = error.message
            self.number += 1

    def end(self) -> None:
        """Stop polling."""
        self._ended.set()


@flags_as_records
def top(
    router: RunningRouter,
    once: Annotated[bool, typer.Option("--once", help="Print the fleet once and exit, as into a pipe.")] = False,
) -> None:
    """Show the fleet of a running router in the terminal, once a second, until `q` or Ctrl-C.

    Each engine has its role, state, sequences, running and waiting requests, KV usage, and step time. `s` sorts by the
    next column, `r` reverses the order, `/` filters engines by a text.

    Examples:
    - `tercet top`
    - `tercet top --once --url http://10.0.0.5:8000`
    """

    def look() -> Mapping[str, Any]:
        return router.ask("GET", "/status")

    if once or not (console.is_terminal and sys.stdin.isatty()):
        with understood():
            console.print(drawn(look(), FleetView(), ALL_LINES), no_wrap=True, crop=False)
        return
    latest = Latest(look)
    try:
        with understood(), keys() as pressed:
            _watch(latest, pressed)
    finally:
        latest.end()


def _watch(latest: Latest, pressed: Callable[[float], str]) -> None:
    view: FleetView | None = FleetView()
    with Live(_screen(latest, FleetView()), console=console, screen=True, auto_refresh=False) as live:
        number = latest.number
        while view is not None:
            given = pressed(KEYS_EVERY)
            for key in given:
                view = view.after(key) if view is not None else None
            if view is not None and (given or latest.number != number):
                number = latest.number
                live.update(_screen(latest, view), refresh=True)


def _screen(latest: Latest, view: FleetView) -> Group:
    trouble = Text(printable(f"tercet: {latest.trouble}"), style="red") if latest.trouble else Text("")
    return Group(drawn(latest.status, view, console.height - 1), trouble)


@contextmanager
def keys() -> Generator[Callable[[float], str]]:
    """Yield a function that waits for keys, at most the given seconds, and returns them; then restore the terminal."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        given = os.read(descriptor, 64).decode("utf-8", "replace")
        if len(given) > 1 and given[0] == "\x1b":  # an arrow, or another key that has no function here
            return ""
        return given or "q"  # the terminal is closed

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
