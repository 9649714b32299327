"""``tercet top``: show the fleet of a running router in a terminal, once a second.

:class:`FleetView` is the view, without I/O: which rows are shown, in which order, and the effect of each key.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tercet.cli.engines import rates_in_words, state_of
from tercet.cli.router_calls import RunningRouter, understood
from tercet.cli.setting_flags import flags_as_records
from tercet.cli.terminal import console, printable
from tercet.protocol import TercetError

# Intervals in seconds: between two calls of the router, and between two checks for keys.
EVERY, KEYS_EVERY = 1.0, 0.1
ALL_LINES = 1_000_000


class Latest:
    """The router's latest status, polled once a second on another thread.

    ``trouble`` is the error of the last poll, and ``away_since`` when polls began to fail; None while they succeed.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look
        self._ended = threading.Event()
        self.status = look()
        self.trouble = ""
        self.away_since: float | None = None
        self.number = 0
        threading.Thread(target=self._follow, name="top", daemon=True).start()

    def _follow(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self.status, self.trouble, self.away_since = self._look(), "", None
            except TercetError as error:
                # The last status stays: a table that is a little old says more than an empty one.
                self.trouble, self.away_since = error.message, self.away_since or time.monotonic()
            self.number += 1

    @property
    def away(self) -> str:
        """That the router does not answer, and for how long; empty if it does."""
        since = self.away_since  # the other thread may change it now
        return "" if since is None else f"no router answers since {time.monotonic() - since:.0f} s"

    def end(self) -> None:
        self._ended.set()


@flags_as_records
def top(
    router: RunningRouter,
    once: Annotated[bool, typer.Option("--once", help="Print the fleet once and exit, as into a pipe.")] = False,
) -> None:
    """Show the fleet of a running router in the terminal, once a second, until `q` or Ctrl-C.

    The first lines have the rates of the last 10 s, the median TTFT and failures. Each engine has its role, state,
    sequences, running and waiting requests, KV usage, and step time. `s` sorts by the next column, `r` reverses the
    order, `/` filters engines by a text. While no router answers, the last table stays, and the command goes on.

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
            if view is not None and (given or latest.number != number or latest.away):
                number = latest.number
                live.update(_screen(latest, view), refresh=True)


def _screen(latest: Latest, view: FleetView) -> Group:
    trouble = Text(printable(f"tercet: {latest.trouble}"), style="red") if latest.trouble else Text("")
    return Group(drawn(latest.status, view, console.height - 1, latest.away), trouble)


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
        # By itself the character is the escape key.
        if len(given) > 1 and given[0] == "\x1b":  # an arrow, or another key that has no function here
            return ""
        return given or "q"  # the terminal is closed

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


Column = Literal["name", "role", "state", "on", "running", "waiting", "kv", "step"]
COLUMNS: tuple[Column, ...] = ("name", "role", "state", "on", "running", "waiting", "kv", "step")
_TITLES: Mapping[Column, str] = {"on": "sequences", "kv": "KV", "step": "step"}
# These columns are sorted with the largest value first, the others alphabetically.
_FALLING = frozenset({"on", "running", "waiting", "kv", "step"})
_STATES = {"serving": "green", "draining": "yellow", "stopping": "yellow", "paused": "yellow"}
LONGEST_FILTER = 40
BAR = 8
LAST_KEYS = "s: sort by next column  r: reverse  /: filter  esc: show all  q: quit"


class Row(NamedTuple):
    """One engine. ``kv`` is a share (0 to 1), ``step`` is in seconds; None means unknown."""

    name: str
    role: str
    state: str
    on: int
    running: int | None = None
    waiting: int | None = None
    kv: float | None = None
    step: float | None = None


def rows_of(status: Mapping[str, Any]) -> list[Row]:
    """Return a row for each engine of a router's status."""
    rows = list[Row]()
    for engine in status["engines"]:
        row = Row(engine["name"], engine["role"], state_of(engine), engine["in_flight"])
        if (report := engine["report"]) is not None:
            running, waiting, kv = report["running"], report["waiting"], report["kv_usage"]
            row = row._replace(running=running, waiting=waiting, kv=kv, step=report.get("step_time"))
        rows.append(row)
    return rows


class FleetView(msgspec.Struct, frozen=True):
    """State of the view: sort column, reversed order (``turned``), filter text, and True for ``typing`` it."""

    column: Column = "name"
    turned: bool = False
    filter: str = ""
    typing: bool = False

    def after(self, key: str) -> FleetView | None:
        """Return the view after a key (one character); None if the key ends it."""
        match key:
            case "\x03" | "\x04":
                return None
            case "\r" | "\n" if self.typing:
                return msgspec.structs.replace(self, typing=False)
            case "\x7f" | "\b" if self.typing:
                return msgspec.structs.replace(self, filter=self.filter[:-1])
            case "\x1b":
                return msgspec.structs.replace(self, typing=False, filter="")
            case _ if self.typing:
                more = key if key.isprintable() and len(self.filter) < LONGEST_FILTER else ""
                return msgspec.structs.replace(self, filter=self.filter + more)
            case "q":
                return None
            case "s":
                following = COLUMNS[(COLUMNS.index(self.column) + 1) % len(COLUMNS)]
                return msgspec.structs.replace(self, column=following, turned=False)
            case "r":
                return msgspec.structs.replace(self, turned=not self.turned)
            case "/":
                return msgspec.structs.replace(self, typing=True, filter="")
            case _:
                return self

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that match the filter, sorted; unknown values come last."""
        wanted = self.filter.lower()
        found = [row for row in rows if wanted in f"{row.name} {row.role} {row.state}".lower()]
        known = [row for row in found if getattr(row, self.column) is not None]
        unknown = [row for row in found if getattr(row, self.column) is None]
        # Two stable sorts: engines with equal values keep the order of their names.
        known.sort(key=lambda row: row.name)
        known.sort(key=lambda row: getattr(row, self.column), reverse=(self.column in _FALLING) != self.turned)
        return known + unknown


def drawn(status: Mapping[str, Any], view: FleetView, height: int, away: str = "") -> Table:
    """Return the fleet as a table of at most ``height`` lines; ``away`` says that the router does not answer now."""
    rows = rows_of(status)
    shown = view.shown(rows)
    program = status["program"].get("program") or "several programs"
    head = (
        f"{', '.join(status['models'])}  {away or ('serves' if status['serving'] else 'does not serve')}  {program}  "
        f"{len(rows)} engines, {sum(row.on for row in rows)} sequences, {len(status['moves'])} running moves"
    )
    if recent := status.get("recent"):
        head += f"\n{rates_in_words(recent)}"
    title = Text(printable(head), style="red" if away else "")
    seen = Table(
        box=None, pad_edge=False, title=title, title_justify="left", header_style="bold", style="dim" if away else ""
    )
    for column in COLUMNS:
        title = _TITLES.get(column, column)
        marked = f"{title} {'▲' if (column in _FALLING) == view.turned else '▼'}" if column == view.column else title
        seen.add_column(marked, justify="left" if column in COLUMNS[:3] else "right", no_wrap=True)
    fitting = max(1, height - 4 - head.count("\n"))
    for row in shown[:fitting]:
        kv = Text("-")
        if (share := row.kv) is not None:
            filled = round(min(1.0, share) * BAR)
            style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
            kv = Text("█" * filled + "░" * (BAR - filled), style=style).append(f" {share:4.0%}", style="")
        seen.add_row(
            Text(printable(row.name)),
            Text(row.role),
            Text(row.state, style=_STATES.get(row.state, "red")),
            Text(str(row.on)),
            Text("-" if row.running is None else str(row.running)),
            Text("-" if row.waiting is None else str(row.waiting), style="yellow" if row.waiting else ""),
            kv,
            Text("-" if row.step is None else f"{row.step * 1000:.1f} ms"),
        )
    hidden = f"{len(shown) - fitting} more do not fit; " if len(shown) > fitting else ""
    filtered = f"filter: {printable(view.filter)}{'_' if view.typing else ''}  " if view.filter or view.typing else ""
    seen.caption, seen.caption_justify = f"{hidden}{filtered}{LAST_KEYS}", "left"
    return seen
