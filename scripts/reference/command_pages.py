"""The page of commands, with their arguments and flags, generated from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from scripts.reference.markdown import code, prose, table

from tercet.cli.app import app
from tercet.settings.declaration import plain_type

HEAD = """# Commands

Every command, argument and flag. `tercet COMMAND --help` shows the same in a terminal. Flags of `tercet up` and `tercet router`
can also be given as [keys of a file or variables](settings.md).

The exit code is 0 for success, 1 for a failure, 2 for wrong use, and 130 after Ctrl-C. An error message is one line on standard
error.
"""


def commands_page() -> str:
    """Return the page."""
    root: Any = typer.main.get_command(app)
    found = list(_leaves(root, "tercet"))
    listed = table(
        ("command", ""), ((f"[`{path}`](#{path.replace(' ', '-')})", _summary(each)) for path, each in found)
    )
    common = f"## tercet\n\nFlags of `tercet` itself:\n\n{_options(root, 'tercet')}"
    return "\n\n".join([HEAD.strip(), listed, common, *(_section(path, each) for path, each in found)])


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield everything that can be run: commands, and groups that also run alone."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None or (command.invoke_without_command and path != "tercet"):
        yield path, command
    for name, each in (subcommands or {}).items():
        if not each.hidden:
            yield from _leaves(each, f"{path} {name}")


def _summary(command: Any) -> str:
    return prose(command.help).partition("\n\n")[0]


def _section(path: str, command: Any) -> str:
    usage = " ".join([path, *command.collect_usage_pieces(_context(command, path))])
    parts = [f"## {path}", f"```text\n{usage}\n```", prose(command.help)]
    if arguments := [each for each in command.params if each.param_type_name == "argument" and each.help]:
        parts.append(
            table(("argument", ""), ((code(each.metavar or each.name.upper()), each.help) for each in arguments))
        )
    return "\n\n".join([*parts, _options(command, path)])


def _context(command: Any, path: str) -> Any:
    return command.context_class(command, info_name=path)


def _options(command: Any, path: str) -> str:
    ctx = _context(command, path)
    options = [each for each in command.get_params(ctx) if each.param_type_name == "option" and not each.hidden]
    rows = [(_flag(each), _default(each), code(each.envvar or ""), help_of(each)) for each in options]
    has_variables = any(row[2] for row in rows)
    if not has_variables:
        return table(("flag", "default", ""), ((flag, default, told) for flag, default, _, told in rows))
    return table(("flag", "default", "variable", ""), rows)


def _flag(option: Any) -> str:
    names = ", ".join(option.opts)
    if option.secondary_opts:
        return code(f"{names} / {', '.join(option.secondary_opts)}")
    return code(names if option.is_flag else f"{names} {option.metavar or _kind(option.type_descriptor.annotation)}")


def _kind(annotation: Any) -> str:
    """Return the kind of a value, in the words of the tables of settings."""
    plain = plain_type(annotation)
    if get_origin(plain) is list:
        return _kind(get_args(plain)[0])
    if get_origin(plain) is Literal:
        return "|".join(map(str, get_args(plain)))
    return {int: "INTEGER", float: "NUMBER", Path: "FILE"}.get(plain, "TEXT")


def help_of(option: Any) -> str:
    """Return the help of an option without the default, which settings have at the end of their help."""
    return (option.help or "").partition(" [default: ")[0]


def _default(option: Any) -> str:
    _, said, default = (option.help or "").partition(" [default: ")
    if said:
        return default.removesuffix("]")
    if isinstance(option.show_default, str):
        return option.show_default
    if option.required:
        return "needed"
    if option.default is None or option.default is False or callable(option.default) or option.is_flag:
        return ""
    if isinstance(option.default, list | tuple):
        return ", ".join(map(str, option.default))
    return str(option.default)
