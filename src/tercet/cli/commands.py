"""The commands of ``tercet``, each imported at its first use; their list is printed without any of them.

Packages add commands by entry points of the group ``tercet.commands``. Help is plain text, and texts of the command
line stay texts: typer would load rich, a Markdown parser and pydantic for them, which takes longer than a command.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import typer
import typer.core
import typer.main

from tercet.protocol.entry_points import COMMANDS, entry_points

# In the order of `tercet --help`; each is a function of a module of this package, or a group of commands. Those of
# `EXTRA_OF` come with another package, which the extra installs.
MODULES: Mapping[str, str] = {
    "up": "up", "down": "detached", "status": "engines", "chat": "chat", "engine": "engine", "router": "up",
    "store": "store", "epp": "", "sidecar": "", "model-router": "", "planner": "",
    "demo": "demo", "chaos": "", "conformance": "", "doctor": "doctor",
    "program": "program", "engines": "engines", "scale": "scale", "upgrade": "",
    "trace": "trace", "top": "top", "bench": "", "sim": "", "advise": "",
}  # fmt: skip
EXTRA_OF: Mapping[str, str] = {
    "epp": "gateway", "sidecar": "gateway", "model-router": "gateway", "upgrade": "gateway",
    "planner": "planner", "chaos": "checks", "conformance": "checks", "bench": "bench", "sim": "lab", "advise": "lab",
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


class _Plain:
    """A command or a group. Help has paragraphs, and lists whose items begin with ``- ``, in the terminal's width."""

    help: Any

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        width = max(20, formatter.width - 2)
        for paragraph in re.split(r"\n\s*\n", (self.help or "").strip()):
            items = re.split(r"\n(?=- )|^(?=- )", plain(paragraph))
            lines = [
                line
                for item in items
                for line in textwrap.wrap(
                    item, width, break_on_hyphens=False, subsequent_indent="  " * (item[:2] == "- ")
                )
            ]
            formatter.write_paragraph()
            formatter.write("".join(f"  {line}\n" for line in lines))

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first paragraph; ``limit`` is ignored, so that no sentence is cut."""
        return " ".join(plain((self.help or "").strip().partition("\n\n")[0]).split())

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, which let values of their type pass unchanged; typer would load pydantic."""
        of_typer: Any = super()
        params = of_typer.get_params(ctx)
        for each in params:
            # Once: click keeps the parameters of a command, and would wrap them at each call.
            if "process_value" not in vars(each):
                each.process_value = partial(_processed, each, each.process_value)
        return params


def _processed(of: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    kind = getattr(getattr(of, "type_descriptor", None), "annotation", None)
    # A path that exists and is not readable is an error of typer's.
    if kind is Path and isinstance(value, str) and (os.access(value, os.R_OK) or not os.path.lexists(value)):
        value = Path(value)
    elif of.required and kind == list[str] and value is not None:
        value = list(value)
    is_ready = kind in (str, list[str]) or value in get_args(kind) or type(value) is kind or isinstance(value, Path)
    if not (is_ready or value is None) or (of.required and of.value_is_missing(value)):
        return convert(ctx, value)
    given = () if value is None and of.multiple else value
    return given if of.callback is None else of.callback(ctx, of, given)


def plain(text: str) -> str:
    """Return a help text without its Markdown."""
    return text.replace("`", "")


class Command(_Plain, typer.core.TyperCommand):
    """A command."""


class Group(_Plain, typer.core.TyperGroup):
    """A command that has commands."""


class Commands(typer.Typer):
    """A group of commands that a module declares."""

    def __init__(self, **given: Any) -> None:
        super().__init__(
            cls=Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **given
        )

    def command(self, name: str | None = None, *, cls: Any = Command, **given: Any) -> Any:
        """Return a decorator that adds a function as a command."""
        return super().command(name, cls=cls, **given)


class LazyGroup(Group):
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
        return Command(name, help=f"Not installed: pip install 'tercet[{EXTRA_OF[name]}]'")
    module, wanted = entry_point_of(name)
    source = _source(module).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return Command(name, help=ast.get_docstring(node))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == wanted:
            call = node.value
            given = call.keywords if isinstance(call, ast.Call) else []
            return Command(name, help=next(ast.literal_eval(k.value) for k in given if k.arg == "help"))
    raise AssertionError(f"{module} does not define the command {name}")


def entry_point_of(name: str) -> tuple[str, str]:
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
        module, wanted = entry_point_of(name)
        found: Any = getattr(import_module(module), wanted)
    else:
        found = provided(COMMANDS, name, EXTRA_OF.get(name, ""), f"tercet {name}")
    # typer builds a command only as a part of a group; the group around it is dropped.
    around = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        around.add_typer(found)
    else:
        around.command(name, cls=SettingsCommand if hasattr(found, SETTINGS_OF) else Command)(found)
    group: Any = typer.main.get_group(around)
    return group.commands[name]
