"""Help of commands whose flags are settings: a short page by subject, and a long one with the keys of the file."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import Any

import typer
import typer.core

from tercet.cli.given_names import kind_of
from tercet.settings import Declared, declared
from tercet.settings.panels import (
    ACCESS,
    ENGINES,
    FAILURES,
    KUBERNETES,
    LIMITS,
    MODEL,
    MOVES,
    OBSERVABILITY,
    PLACEMENT,
    SERVER,
)

WIDEST, LEAST = 100, 60
NAME_COLUMNS = 34
OTHERS = "Others"
ORDER = (MODEL, ENGINES, KUBERNETES, SERVER, PLACEMENT, LIMITS, FAILURES, MOVES, ACCESS, OBSERVABILITY)


class SettingsCommand(typer.core.TyperCommand):
    """A command whose ``--help`` fits on two screens; ``--help-all`` adds examples and settings of the file only."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the short page."""
        typer.echo("\n".join(help_page(self, ctx, everything=False)))


def help_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the long page and exit, if ``--help-all`` was given."""
    if wanted:
        typer.echo("\n".join(help_page(ctx.command, ctx, everything=True)))
        raise typer.Exit


def help_page(command: Any, ctx: Any, everything: bool) -> Iterator[str]:
    """Yield the lines of a help page."""
    width = max(LEAST, min(WIDEST, ctx.terminal_width or _columns()))
    yield " ".join(["Usage:", ctx.command_path, *command.collect_usage_pieces(ctx)])
    about, _, examples = command.help.partition("\nExamples:\n")
    paragraphs = re.split(r"\n\s*\n", about.strip())
    for paragraph in paragraphs if everything else paragraphs[:1]:
        yield ""
        yield from textwrap.wrap(_plain(paragraph), width)
    shown = _plain(examples).strip().splitlines()
    yield from ["", _heading("Examples"), *shown[: None if everything else 2]]
    settings = {each.flag: each for each in _settings_of(command) if each.flag}
    options = [each for each in command.get_params(ctx) if each.param_type_name == "option"]
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in options:
        setting = settings.get(option.opts[0])
        value = setting.shown_kind if setting else "" if option.is_flag else "FILE"
        name = f"{option.opts[0]} {value}".strip()
        told = _plain(option.help or "")
        panels.setdefault(option.rich_help_panel or OTHERS, []).append((name, told if everything else _short(told)))
    yield from _listed(panels, width)
    if everything:
        yield from ["", "Settings of the file of --config only, or of variables (`TERCET_` and the key):"]
        yield from _listed(_of_the_file(_settings_of(command)), width)
    else:
        left_out = sum(1 for each in _settings_of(command) if each.setting.in_file)
        told = f", {left_out} more settings of the file" if left_out else ""
        yield from ["", f"{ctx.command_path} --help-all has all examples{told}."]


def _settings_of(command: Any) -> tuple[Declared, ...]:
    kind = kind_of(command)
    return () if kind is None else declared(kind)


def _of_the_file(settings: Sequence[Declared]) -> dict[str, list[tuple[str, str]]]:
    panels: dict[str, list[tuple[str, str]]] = {}
    for each in settings:
        if each.setting.in_file:
            default = f" [default: {each.shown_default}]" if each.shown_default else ""
            told = (f"{each.key}: {each.shown_kind}", _plain(each.help + default))
            panels.setdefault(each.setting.panel or OTHERS, []).append(told)
    return panels


def _listed(panels: dict[str, list[tuple[str, str]]], width: int) -> Iterator[str]:
    for title in sorted(panels, key=_place):
        yield from ["", _heading(title)]
        for name, told in panels[title]:
            left = f"  {name}  ".ljust(NAME_COLUMNS)
            if len(left) + len(told) <= width:
                yield left + told
                continue
            lines = textwrap.wrap(told, width - NAME_COLUMNS)
            yield left.rstrip() if len(left) > NAME_COLUMNS else left + lines.pop(0)
            yield from (" " * NAME_COLUMNS + line for line in lines)


def _place(title: str) -> int:
    return ORDER.index(title) if title in ORDER else len(ORDER) + (title == OTHERS)


def _heading(text: str) -> str:
    return typer.style(text, bold=True)


def _plain(text: str) -> str:
    """Return a help text without its Markdown."""
    return text.replace("`", "").replace("[default: ", "[")


def _short(text: str) -> str:
    """Return a help text's first clause, its unit, and its default if that is a value."""
    told, _, default = text.partition(" [")
    clause = re.split(r"; |\. (?!\.)", told)[0].rstrip(".")
    unit = re.search(r" \((?:seconds|bytes|tokens|GiB)\)(?=\.$)", told)
    clause += unit[0] if unit and unit[0] not in clause else ""
    return clause + ("" if default in ("", "none]", "off]", "no limit]") else f" [{default}")


def _columns() -> int:
    return get_terminal_size((WIDEST, 50)).columns
