"""The page of environment variables: those of settings, of flags, and others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer
from scripts.reference.command_pages import help_of
from scripts.reference.markdown import table
from scripts.reference.settings_pages import OF_COMMANDS

from tercet.cli.app import app
from tercet.settings import declared
from tercet.settings.process_settings import VARIABLES

HEAD = """# Environment variables

A flag overrides a variable, and a variable overrides a file. `tercet bench` and `tercet sim` read only the variables that this page
names for them, so that a measurement depends only on its command and its file.

In Kubernetes, all pods of a namespace with a service named `tercet` have a variable `TERCET_PORT` with a URL, such as
`tcp://10.96.0.7:8000`; a service named `tercet-metrics` sets `TERCET_METRICS_PORT`. Such URLs are ignored.
"""


def environment_page() -> str:
    """Return the page."""
    alone = table(("variable", "read by", "default", ""), ((f"`{each.name}`", *each[1:]) for each in VARIABLES))
    return "\n\n".join(
        [
            HEAD.strip(),
            "## Of settings\n\nEach is the [setting](settings.md) of the same name. Items of a list and KEY=VALUE pairs are "
            "separated as in a shell.",
            table(("variable", "setting of", ""), _of_settings()),
            "## Of commands\n\nThese replace flags of commands that call a running router.",
            table(("variable", "flag", ""), _of_flags()),
            "## Others",
            alone,
        ]
    )


def _of_settings() -> Iterator[tuple[str, str, str]]:
    """Yield a row for each variable, and one more for each command to which it has another meaning."""
    commands: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for command, kind in OF_COMMANDS.items():
        for each in declared(kind):
            commands[each.env, each.help].append(f"`{command}`")
    for (name, meaning), of in sorted(commands.items(), key=lambda row: row[0][0]):
        yield f"`{name}`", ", ".join(of), meaning


def _of_flags() -> list[tuple[str, str, str]]:
    root: Any = typer.main.get_command(app)
    found: dict[tuple[str, str], str] = {}
    for option in _options(root):
        if option.envvar:
            found.setdefault((option.envvar, option.opts[0]), help_of(option))
    return [(f"`{variable}`", f"`{flag}`", said) for (variable, flag), said in sorted(found.items())]


def _options(command: Any) -> Iterator[Any]:
    yield from (each for each in command.params if each.param_type_name == "option")
    for each in getattr(command, "commands", {}).values():
        yield from _options(each)
