"""The ``tercet`` command and how it ends: one line of complaint, exit code 2 for what was refused, 1 for a failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main

from tercet import __version__
from tercet.cli.commands import LazyGroup
from tercet.cli.given_names import kind_of
from tercet.cli.terminal import NobodyReads, forget_stdout, printable
from tercet.cli.unknown_variables import unknown_variables
from tercet.protocol import TercetError
from tercet.settings import Declared, declared
from tercet.settings.declaration import near

# What runs for long, by what the environment says as well.
SERVERS = frozenset({"up", "engine", "router", "epp", "sidecar", "model-router", "rescheduler", "demo", "chaos"})
# As click has it for what it prints by itself.
NOBODY_READS = 1
# The bases of what typer says about the command line; they come from the click that it brings, and have no public name.
_UsageError: Any = typer.BadParameter.__mro__[1]
_CommandLineError: Any = typer.BadParameter.__mro__[2]
_NoSuchOption: Any = next(each for each in _UsageError.__subclasses__() if each.__name__ == "NoSuchOption")

app = typer.Typer(
    name="tercet",
    cls=LazyGroup,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tercet {__version__}")
        raise typer.Exit


@app.callback()
def tercet(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Programmable orchestration for LLM serving: three verbs per engine, a few lines per serving pattern.

    Start with `tercet demo`. Then:

    - `tercet up` runs a fleet on this machine, `tercet up --program mine.py:function` runs it your way.
    - `tercet status` shows a running one, `tercet chat` talks to it, `tercet down` ends one in the background.
    - `tercet engine` and `tercet router` are its parts, for whatever runs your processes.
    - `tercet program`, `tercet engines`, `tercet adapters` and `tercet moves` change them while traffic flows.
    """
    if context.invoked_subcommand in SERVERS:
        for line in unknown_variables(context.invoked_subcommand or ""):
            typer.echo(f"tercet: {line}", err=True)


@cache
def _command() -> Any:
    """The command line as click has it; it takes a tenth of a second to build."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and exit."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(_run(sys.argv[1:] or ["--help"]))


def _run(argv: list[str]) -> int:
    """Exit code of one command line, with its complaint on standard error."""
    return exit_code_of(lambda: _with_all_written(_command().main(argv, prog_name="tercet", standalone_mode=False)))


def _with_all_written(code: int | None) -> int | None:
    sys.stdout.flush()
    return code


def exit_code_of(run: Callable[[], int | None]) -> int:
    """Exit code of a command, with its complaint on standard error."""
    try:
        return run() or 0
    except _NoSuchOption as error:
        return _complain(f"No such option: {error.option_name}; {_nearest(error)}", 2)
    except _CommandLineError as error:
        message = error.format_message().rstrip(".")
        # Of a command that was given without any argument the help is printed already, and there is nothing to add.
        command = error.ctx.command_path if error.ctx is not None else "tercet"
        return _complain(f"{message}; see {command} --help", 2) if message else 2
    except TercetError as error:
        return _complain(error.message, error.exit_code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (NobodyReads, BrokenPipeError):
        forget_stdout()
        return NOBODY_READS


def _nearest(error: Any) -> str:
    """The option that was probably meant, and all that the command has."""
    path = error.ctx.command_path
    kind = kind_of(error.ctx.command)
    for setting in () if kind is None else declared(kind):
        if setting.setting.in_file and setting.any_flag == error.option_name:
            line = f"{setting.key}: {_example(setting)}"
            return f"write `{line}` into the file of --config, or set {setting.env}; see {path} --help-all"
    given = (name for each in error.ctx.command.params for name in (*each.opts, *each.secondary_opts))
    known = sorted(name for name in given if name.startswith("--"))
    hint = near(error.option_name, known)
    listed = f"{path} has {', '.join(known) or 'none'}; see {path} --help"
    return f"{hint} {listed}" if hint.startswith("did you mean") else listed


def _example(setting: Declared) -> str:
    """A value of a setting as YAML has it: its default, if it has one."""
    value = setting.shown_default if setting.default not in (None, (), {}) else setting.shown_kind
    return f"[{value}]" if setting.is_list else value


def _complain(text: str, code: int) -> int:
    typer.echo(printable(f"tercet: {text}"), err=True)
    return code


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Unwinds, so that whatever was started is stopped."""
    sys.exit(128 + number)
