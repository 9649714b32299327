"""The ``tercet`` command and its exit: an error is one line, with exit code 2 for refused input and 1 for a failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise, takewhile
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main

from tercet import __version__
from tercet.cli.commands import LazyGroup
from tercet.cli.terminal import NobodyReads, forget_stdout, printable
from tercet.protocol import BadRequest, TercetError

# Commands that run for a long time and read settings from environment variables.
SERVERS = frozenset({"up", "engine", "router", "store", "epp", "sidecar", "model-router", "demo", "chaos"})
# The exit code that click uses when nothing reads its output.
NOBODY_READS = 1
# Number of options that the error about an unknown one lists.
LISTED = 12
# Base classes of typer's errors about the command line; they come from its bundled click, and have no public name.
_UsageError: Any = typer.BadParameter.__mro__[1]
_CommandLineError: Any = typer.BadParameter.__mro__[2]
_NoSuchOption: Any = next(each for each in _UsageError.__subclasses__() if each.__name__ == "NoSuchOption")

app = typer.Typer(name="tercet", cls=LazyGroup, rich_markup_mode=None, pretty_exceptions_enable=False)


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

    - `tercet up` runs a fleet on this machine, `tercet up --program mine.py:function` uses your program.
    - `tercet status` shows a running fleet, `tercet chat` sends it questions, `tercet down` stops a background fleet.
    - `tercet engine` and `tercet router` run one process of a fleet, for your own process manager.
    - `tercet program`, `tercet engines`, `tercet scale` and `tercet upgrade` change a fleet while it serves.
    """
    if context.invoked_subcommand in SERVERS:
        from tercet.cli.setting_flags import unknown_variables

        for line in unknown_variables(context.invoked_subcommand or ""):
            typer.echo(f"tercet: {line}", err=True)


@cache
def _command() -> Any:
    """Return click's object of the command line; building it takes a tenth of a second."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and exit."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(_run(sys.argv[1:] or ["--help"]))


def _run(argv: list[str]) -> int:
    """Run one command line and return its exit code; print its error on standard error."""

    def run() -> int | None:
        require_values(_command(), argv)
        code = _command().main(argv, prog_name="tercet", standalone_mode=False)
        sys.stdout.flush()  # here, where the error of a closed pipe is caught: at the interpreter's exit it is printed
        return code

    return exit_code_of(run)


def exit_code_of(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; print its error on standard error."""
    try:
        return run() or 0
    except _NoSuchOption as error:
        return _complain(f"No such option: {error.option_name}; {_nearest(error)}", 2)
    except _CommandLineError as error:
        if refused := _refused_value(error):
            return _complain(refused, 2)
        message = error.format_message().rstrip(".")
        # The message is empty if a command was given without arguments: its help is printed already.
        command = error.ctx.command_path if error.ctx is not None else "tercet"
        return _complain(f"{message}; see {command} --help", 2) if message else 2
    except TercetError as error:
        return _complain(error.message, error.exit_code)
    # The exit code that shells expect of a command which a signal has ended.
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (NobodyReads, BrokenPipeError):
        forget_stdout()
        return NOBODY_READS


# What typer's validation finds, in the words of settings.
_MUST_BE: Mapping[str, str] = {
    "int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number",
    "greater_than_equal": "at least {ge:g}", "less_than_equal": "at most {le:g}",
    "greater_than": "greater than {gt:g}", "less_than": "less than {lt:g}",
}  # fmt: skip


def _refused_value(error: Any) -> str:
    """Return the sentence about a flag's or an argument's value that has the wrong form; empty for other errors."""
    found = getattr(error.__cause__, "errors", None)
    if found is None or error.param is None:
        return ""
    first = found()[0]
    # Of several names the long one; those that turn a flag off are not among them.
    name, value = max(error.param.opts, key=len), str(first["input"])
    if (form := _MUST_BE.get(first["type"])) is None:
        return f"{name}: {first['msg'].removeprefix('Value error, ').rstrip('.')}"
    shown = value if value.removeprefix("-").replace(".", "", 1).isdigit() else repr(value)
    return f"{name}: must be {form.format(**first.get('ctx', {}))}, is {shown}"


def _nearest(error: Any) -> str:
    """Return a hint for an unknown option: the most similar one, or the first options of the command."""
    from tercet.cli.setting_flags import kind_of
    from tercet.settings import declared
    from tercet.settings.declaration import near

    path = error.ctx.command_path
    kind = kind_of(error.ctx.command)
    for setting in () if kind is None else declared(kind):
        if setting.setting.in_file and setting.any_flag == error.option_name:
            value = setting.shown_default if setting.default not in (None, (), {}) else setting.shown_kind
            line = f"{setting.key}: {f'[{value}]' if setting.is_list else value}"
            return f"write `{line}` into the file of --config, or set {setting.env}; see {path} --help-all"
    given = (name for each in error.ctx.command.params for name in (*each.opts, *each.secondary_opts))
    known = sorted(name for name in given if name.startswith("--"))
    hint = near(error.option_name, known)
    if not hint.startswith("did you mean"):
        more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
        hint = f"{path} has {', '.join(known[:LISTED]) or 'none'}{more};"
    return f"{hint} see {path} --help"


def _complain(text: str, code: int) -> int:
    typer.echo(printable(f"tercet: {text}"), err=True)
    return code


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Raise ``SystemExit``, so that cleanup code stops what was started."""
    sys.exit(128 + number)


def require_values(command: Any, argv: Sequence[str]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a flag that is followed by another flag instead of its value.

    ``command`` is click's object of the command line ``argv``. Words after ``--`` are not flags of it.
    """
    words = list(takewhile(lambda word: word != "--", argv))
    # Down to the command whose flags these are: one name may take a value in one command and none in another.
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    takes_value = {
        name: not each.is_flag
        for each in command.params
        for name in (*each.opts, *each.secondary_opts)
        if name.startswith("-")
    }
    for flag, after in pairwise(words):
        if takes_value.get(flag) and (after in takes_value or after == "--help"):
            raise BadRequest(f"{flag}: needs a value, and {after} follows it", flag)
