"""The commands of ``tercet``, each imported at its first use; their list is printed without any of them.

Packages add commands by entry points of the group ``tercet.commands``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

from tercet.protocol.entry_points import COMMANDS, entry_points

# In the order of `tercet --help`; each is a function of a module of this package, or a group of commands. Those of
# `EXTRA_OF` come with another package, which the extra installs.
MODULES: Mapping[str, str] = {
    "up": "up", "down": "detached", "status": "status", "chat": "chat", "engine": "engine", "router": "servers",
    "epp": "", "sidecar": "", "model-router": "", "planner": "",
    "demo": "demo", "chaos": "", "conformance": "", "doctor": "doctor",
    "program": "program", "engines": "engines", "scale": "scale", "upgrade": "",
    "trace": "trace", "top": "top", "bench": "", "sim": "",
}  # fmt: skip
EXTRA_OF: Mapping[str, str] = {
    "epp": "gateway", "sidecar": "gateway", "model-router": "gateway", "upgrade": "gateway",
    "planner": "lab", "chaos": "lab", "conformance": "lab", "bench": "lab", "sim": "lab",
}  # fmt: skip
# Commands that are parts of other commands, or were replaced by them.
PARTS_OF: Mapping[str, str] = {
    "adapters": "tercet engines adapters",
    "moves": "tercet status --moves, or tercet engines move",
    "profile": "tercet bench profile",
    "rescheduler": "tercet router --reschedule POLICY with --state: each router moves its own sequences",
}


class LazyCommands(Mapping[str, Any]):
    """Commands by name; reading one imports and builds it."""

    def __getitem__(self, name: str) -> Any:
        return _built(name)  # raises KeyError for an unknown command

    def __contains__(self, name: object) -> bool:
        return name in MODULES or name in entry_points(COMMANDS)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*MODULES, *entry_points(COMMANDS))))

    def __len__(self) -> int:
        return len(list(iter(self)))


class LazyGroup(typer.core.TyperGroup):
    """The command ``tercet``, which holds all other commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` names; the error for a part of another command names that command."""
        if args[0] in PARTS_OF:
            ctx.fail(f"No such command '{args[0]}'. Use {PARTS_OF[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; it lists the commands without an import of their modules."""
        real, self.commands = self.commands, {name: _listed(name) for name in self.commands}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = real


def _listed(name: str) -> Any:
    """Return a command with the real one's help, read from the source of its module, which is not imported."""
    if not MODULES.get(name) and name not in entry_points(COMMANDS):
        return typer.core.TyperCommand(name, help=f"Not installed: pip install 'tercet[{EXTRA_OF[name]}]'")
    module, wanted = place_of(name)
    source = _source(module).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return typer.core.TyperCommand(name, help=ast.get_docstring(node))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == wanted:
            call = node.value
            given = call.keywords if isinstance(call, ast.Call) else []
            return typer.core.TyperGroup(
                name=name, help=next(ast.literal_eval(k.value) for k in given if k.arg == "help")
            )
    raise AssertionError(f"{module} does not define the command {name}")


def place_of(name: str) -> tuple[str, str]:
    """Return the module of an installed command, and the command's name in it."""
    if module := MODULES.get(name):
        return f"tercet.cli.{module}", name.replace("-", "_")
    module, _, wanted = entry_points(COMMANDS)[name].partition(":")
    return module, wanted


def _source(module: str) -> Path:
    """Return the file of a module; of its packages only the outermost one is looked up, and none is imported."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).joinpath(*inner).with_suffix(".py")


@cache
def _built(name: str) -> Any:
    from tercet.cli.setting_flags import SETTINGS_OF, SettingsCommand
    from tercet.protocol.entry_points import provided

    if name not in MODULES and name not in entry_points(COMMANDS):
        raise KeyError(name)
    if MODULES.get(name):
        module, wanted = place_of(name)
        found: Any = getattr(import_module(module), wanted)
    else:
        found = provided(COMMANDS, name, EXTRA_OF.get(name, ""), f"tercet {name}")
    around = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        around.add_typer(found)
    else:
        around.command(name, cls=SettingsCommand if hasattr(found, SETTINGS_OF) else None)(found)
    group: Any = typer.main.get_group(around)
    return group.commands[name]
