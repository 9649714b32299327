"""The view of ``tercet top``: rows of engines, sorted and filtered, and the effect of each key.

This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from tercet.cli.terminal import printable

Column = Literal["name", "role", "state", "on", "running", "waiting", "kv", "step"]
COLUMNS: tuple[Column, ...] = ("name", "role", "state", "on", "running", "waiting", "kv", "step")
_TITLES: Mapping[Column, str] = {"on": "sequences", "kv": "KV", "step": "step"}
# These columns are sorted with the largest value first, the others alphabetically.
_FALLING = frozenset({"on", "running", "waiting", "kv", "step"})
_STATES = {"serving": "green", "draining": "yellow", "stopping": "yellow"}
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
    return [_row(engine) for engine in status["engines"]]


def _row(engine: Mapping[str, Any]) -> Row:
    leaving = "draining" if engine["draining"] else "stopping" if engine["stopping"] else ""
    state = leaving or ("serving" if engine["reachable"] else "refused" if engine["refused"] else "unreachable")
    name, role, on = engine["name"], engine["role"], engine["in_flight"]
    report = engine["report"]
    if report is None:
        return Row(name, role, state, on)
    return Row(name, role, state, on, report["running"], report["waiting"], report["kv_usage"], report.get("step_time"))


class FleetView(msgspec.Struct, frozen=True):
    """State of the view: sort column, reversed order (``turned``), filter text, and True for ``typing`` it."""

    column: Column = "name"
    turned: bool = False
    filter: str = ""
    typing: bool = False

    def after(self, key: str) -> FleetView | None:
        """Return the view after a key (one character); None if the key ends it."""
        if self.typing:
            return self._typed(key)
        match key:
            case "q" | "\x03" | "\x04":
                return None
            case "s":
                following = COLUMNS[(COLUMNS.index(self.column) + 1) % len(COLUMNS)]
                return msgspec.structs.replace(self, column=following, turned=False)
            case "r":
                return msgspec.structs.replace(self, turned=not self.turned)
            case "/":
                return msgspec.structs.replace(self, typing=True, filter="")
            case "\x1b":
                return msgspec.structs.replace(self, filter="")
            case _:
                return self

    def _typed(self, key: str) -> FleetView | None:
        if key in ("\x03", "\x04"):
            return None
        if key in ("\r", "\n"):
            return msgspec.structs.replace(self, typing=False)
        if key == "\x1b":
            return msgspec.structs.replace(self, typing=False, filter="")
        if key in ("\x7f", "\b"):
            return msgspec.structs.replace(self, filter=self.filter[:-1])
        more = key if key.isprintable() and len(self.filter) < LONGEST_FILTER else ""
        return msgspec.structs.replace(self, filter=self.filter + more)

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that match the filter, sorted; unknown values come last."""
        wanted = self.filter.lower()
        found = [row for row in rows if wanted in f"{row.name} {row.role} {row.state}".lower()]
        known = [row for row in found if getattr(row, self.column) is not None]
        unknown = [row for row in found if getattr(row, self.column) is None]
        known.sort(key=lambda row: row.name)
        known.sort(key=lambda row: getattr(row, self.column), reverse=(self.column in _FALLING) != self.turned)
        return known + unknown


def drawn(status: Mapping[str, Any], view: FleetView, height: int) -> Table:
    """Return the fleet as a table of at most ``height`` lines."""
    rows = rows_of(status)
    shown = view.shown(rows)
    program = status["program"].get("program") or "several programs"
    head = (
        f"{', '.join(status['models'])}  {'serves' if status['serving'] else 'does not serve'}  {program}  "
        f"{len(rows)} engines, {sum(row.on for row in rows)} sequences, {len(status['moves'])} running moves"
    )
    seen = Table(box=None, pad_edge=False, title=printable(head), title_justify="left", header_style="bold")
    for column in COLUMNS:
        title = _TITLES.get(column, column)
        marked = f"{title} {'▲' if (column in _FALLING) == view.turned else '▼'}" if column == view.column else title
        seen.add_column(marked, justify="left" if column in COLUMNS[:3] else "right", no_wrap=True)
    fitting = max(1, height - 4)
    for row in shown[:fitting]:
        seen.add_row(*_cells(row))
    seen.caption = _caption(view, len(shown), fitting)
    seen.caption_justify = "left"
    return seen


def _caption(view: FleetView, found: int, fitting: int) -> str:
    hidden = f"{found - fitting} more do not fit; " if found > fitting else ""
    filtered = f"filter: {printable(view.filter)}{'_' if view.typing else ''}  " if view.filter or view.typing else ""
    return f"{hidden}{filtered}{LAST_KEYS}"


def _cells(row: Row) -> list[Text]:
    return [
        Text(printable(row.name)),
        Text(row.role),
        Text(row.state, style=_STATES.get(row.state, "red")),
        Text(str(row.on)),
        Text("-" if row.running is None else str(row.running)),
        Text("-" if row.waiting is None else str(row.waiting), style="yellow" if row.waiting else ""),
        _share(row.kv),
        Text("-" if row.step is None else f"{row.step * 1000:.1f} ms"),
    ]


def _share(share: float | None) -> Text:
    if share is None:
        return Text("-")
    filled = round(min(1.0, share) * BAR)
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text("█" * filled + "░" * (BAR - filled), style=style).append(f" {share:4.0%}", style="")
