"""The commands of ``tercet``, each imported at its first use; their list is printed without any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

# In the order of `tercet --help`; each is a function of its module, or a group of commands.
MODULES: Mapping[str, str] = {
    "up": "up", "down": "detached", "status": "status", "chat": "chat", "engine": "engine", "router": "servers",
    "epp": "epp", "sidecar": "sidecar", "model-router": "model_router", "rescheduler": "servers", "planner": "planner",
    "demo": "demo", "chaos": "chaos", "doctor": "doctor",
    "program": "program", "engines": "engines", "scale": "scale", "upgrade": "upgrade",
    "trace": "trace", "top": "top", "bench": "bench", "sim": "sim",
}  # fmt: skip
# Commands that are parts of other commands.
PARTS_OF: Mapping[str, str] = {
    "adapters": "tercet engines adapters",
    "moves": "tercet status --moves, or tercet engines move",
    "profile": "tercet bench profile",
}


class LazyCommands(Mapping[str, Any]):
    """Commands by name; reading one imports and builds it."""

    def __getitem__(self, name: str) -> Any:
        return _built(name)  # raises KeyError for an unknown command

    def __contains__(self, name: object) -> bool:
        return name in MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


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
        real, self.commands = self.commands, {name: _listed(name) for name in MODULES}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = real


def _listed(name: str) -> Any:
    """Return a command with the real one's help, read from the source of its module, which is not imported."""
    module, wanted = MODULES[name], name.replace("-", "_")
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return typer.core.TyperCommand(name, help=ast.get_docstring(node))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == wanted:
            call = node.value
            given = call.keywords if isinstance(call, ast.Call) else []
            return typer.core.TyperGroup(
                name=name, help=next(ast.literal_eval(k.value) for k in given if k.arg == "help")
            )
    raise AssertionError(f"{module}.py does not define the command {name}")


@cache
def _built(name: str) -> Any:
    from tercet.cli.given_names import SETTINGS_OF
    from tercet.cli.settings_help import SettingsCommand

    found: Any = getattr(import_module(f"tercet.cli.{MODULES[name]}"), name.replace("-", "_"))
    around = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        around.add_typer(found)
    else:
        around.command(name, cls=SettingsCommand if hasattr(found, SETTINGS_OF) else None)(found)
    group: Any = typer.main.get_group(around)
    return group.commands[name]
