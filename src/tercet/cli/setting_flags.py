"""Flags of commands: settings, each declared once in :mod:`tercet.settings`, and records of other flags; their help.

A command with many settings has a short help by subject, and a long one with the keys of the file. An error about a
value is renamed, so that it begins with the flag or argument that gave the value.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from tercet.cli.commands import Command, plain
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.protocol.entry_points import SETTINGS, entry_points, provided
from tercet.settings import (
    Declared,
    RouterConfig,
    Settings,
    Source,
    declared,
    decode_settings,
    from_environment,
    key_values,
    read_yaml,
)
from tercet.settings.declaration import (
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
    VARIABLE_PREFIX,
    near,
)
from tercet.settings.process_settings import INTERNAL, OF_COMMANDS, OF_TESTS, VARIABLES

WIDEST, LEAST = 100, 60
NAME_COLUMNS = 34
OTHERS = "Others"
ORDER = (MODEL, ENGINES, KUBERNETES, SERVER, PLACEMENT, LIMITS, FAILURES, MOVES, ACCESS, OBSERVABILITY)


class SettingsCommand(Command):
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
    width = max(LEAST, min(WIDEST, ctx.terminal_width or get_terminal_size((WIDEST, 50)).columns))
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
        text = _plain(option.help or "")
        panels.setdefault(option.rich_help_panel or OTHERS, []).append((name, text if everything else _short(text)))
    yield from _listed(panels, width)
    of_the_file = [each for each in _settings_of(command) if each.setting.in_file]
    if not everything:
        more = f", {len(of_the_file)} more settings of the file" if of_the_file else ""
        yield from ["", f"{ctx.command_path} --help-all has all examples{more}."]
        return
    panels = {}
    for each in of_the_file:
        default = f" [default: {each.shown_default}]" if each.shown_default else ""
        row = (f"{each.key}: {each.shown_kind}", _plain(each.help + default))
        panels.setdefault(each.setting.panel or OTHERS, []).append(row)
    yield from ["", "Settings of the file of --config only, or of variables (`TERCET_` and the key):"]
    yield from _listed(panels, width)


def _settings_of(command: Any) -> tuple[Declared, ...]:
    kind = kind_of(command)
    return () if kind is None else declared(kind)


def _listed(panels: dict[str, list[tuple[str, str]]], width: int) -> Iterator[str]:
    for title in sorted(panels, key=lambda title: ORDER.index(title) if title in ORDER else 99 + (title == OTHERS)):
        yield from ["", _heading(title)]
        for name, text in panels[title]:
            left = f"  {name}  ".ljust(NAME_COLUMNS)
            if len(left) + len(text) <= width:
                yield left + text
                continue
            lines = textwrap.wrap(text, width - NAME_COLUMNS)
            yield left.rstrip() if len(left) > NAME_COLUMNS else left + lines.pop(0)
            yield from (" " * NAME_COLUMNS + line for line in lines)


def _heading(text: str) -> str:
    return typer.style(text, bold=True)


def _plain(text: str) -> str:
    return plain(text).replace("[default: ", "[")


def _short(text: str) -> str:
    """Return a help text's first clause, its unit, and its default if that is a value."""
    sentences, _, default = text.partition(" [")
    clause = re.split(r"; |\. (?!\.)", sentences)[0].rstrip(".")
    unit = re.search(r" \((?:seconds|bytes|tokens|GiB)\)(?=\.$)", sentences)
    clause += unit[0] if unit and unit[0] not in clause else ""
    return clause + ("" if default in ("", "none]", "off]", "no limit]") else f" [{default}")


# Attribute of a command's function: the class of its settings.
SETTINGS_OF = "settings_kind"
# Flags of settings whose parts are checked later, under these names.
PARTS: Mapping[str, str] = {"args": "--program-arg", "profile": "--simulate", "engine options": "--option"}


@contextmanager
def given_as(names: Mapping[str, str]) -> Generator[None]:
    """Replace a name at the start of a :class:`~tercet.protocol.BadRequest` of the block by its flag in ``names``."""
    try:
        yield
    except BadRequest as error:
        name, colon, what = error.message.partition(":")
        if colon and name in names:
            raise BadRequest(f"{names[name]}:{what}", names[name]) from error
        raise


def kind_of(command: Any) -> type[Settings] | None:
    """Return the class of settings whose fields are the flags of ``command``; None if its flags are not settings."""
    return getattr(command.callback, SETTINGS_OF, None)


def flags_of(kind: type[Settings]) -> dict[str, str]:
    """Return the flag of each setting, by its key."""
    return {each.key: each.flag for each in declared(kind) if each.flag}


def flags_as_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with a flag for each field of its parameters that are dataclasses, in the place of these.

    A call makes the records from the flags.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    records: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    flags = dict[str, dict[str, inspect.Parameter]]()
    for name, kind in records.items():
        types = get_type_hints(kind, include_extras=True)  # a record may inherit fields of a class of another module
        signature = inspect.signature(kind).parameters
        flags[name] = {field: each.replace(annotation=types[field]) for field, each in signature.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{flag: given.pop(flag) for flag in flags[name] if flag in given})
            for name, kind in records.items()
        }
        command(**given, **made)

    return taking(run, [flag for name, own in parameters.items() for flag in flags.get(name, {name: own}).values()])


def taking(run: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Return ``run`` with the signature of these parameters, which become keyword-only."""
    taken = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in taken}
    return run


def refuse(given: Mapping[str, bool], why: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for the first flag of ``given`` that is True, with the reason."""
    for flag, is_given in given.items():
        if is_given:
            raise BadRequest(f"{flag}: {why}", flag)


def require_defaults(record: Any, needs: str, *names: str) -> None:
    """Refuse the first of these fields of a record that is not its default: its flag has no effect without ``needs``.

    Raises :class:`~tercet.protocol.BadRequest`.
    """
    given = {
        "--" + each.name.replace("_", "-"): getattr(record, each.name) != each.default
        for each in fields(record)
        if each.name in names
    }
    refuse(given, f"needs {needs}")


S = TypeVar("S", bound=Settings)

Model = Annotated[
    str, typer.Option(help="Model: `smollm2`, a checkpoint's directory, or a hub id; `smollm2` is built in.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Data type of weights and activations, as vLLM's `--dtype`. Use float32 for token-exact comparisons.",
        show_default="vLLM's on GPUs; bfloat16 on CPUs, or float32 if the CPU has no instructions for it",
    ),
]
ServedModelName = Annotated[str | None, typer.Option(help="Name of the model in the OpenAI API.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
ProgramArg = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Parameter of the program. Repeatable.")
]
VLLMArgs = Annotated[
    list[str] | None, typer.Argument(metavar="-- VLLM FLAGS", help="Flags for vLLM, forwarded unchanged.")
]


VLLM_FLAGS = "vLLM flags after --"
Config = Annotated[
    Path | None, typer.Option(help="YAML file with the same keys; flags and TERCET_ variables override it.")
]

HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=help_all, help="Show all settings and examples.")
]


def settings_command(kind: type[Settings], rest: str = "") -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Return a decorator for a command that takes a record of ``kind``, with ``--config`` and a flag for each setting.

    Arguments after ``--`` are the setting ``rest``. A call decodes the record from flags, the environment and the file.
    """

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(config: Path | None = None, help_all: bool = False, **given: Any) -> None:
            flags = flags_given(kind, given, rest)
            sources = [flags, from_environment(kind), *([] if config is None else [read_yaml(config)])]
            with given_as({**PARTS, **flags_of(kind)}):
                command(decode_settings(kind, *sources))

        setattr(run, SETTINGS_OF, kind)
        return taking(run, optional({**parameters_of(kind, rest), "config": Config, "help_all": HelpAll}))

    return decorate


def with_flags_of(kind: type[S]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a flag for each setting of ``kind``; the command's last parameter gets the record.

    The record is decoded from flags only, not from environment variables or a file.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        *own, last = inspect.signature(command, eval_str=True).parameters.values()
        flags = optional(parameters_of(kind, every=True))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            flag_values = {flag.name: given.pop(flag.name) for flag in flags}
            command(**given, **{last.name: decode_settings(kind, flags_given(kind, flag_values))})

        return taking(run, [*own, *flags])

    return decorate


def optional(annotations: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return a parameter for each name, with its annotation and the default None."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, kind, default=None, annotation=each) for name, each in annotations.items()]


def parameters_of(
    kind: type[Settings], rest: str = "", by_variable: Collection[str] = (), every: bool = False
) -> dict[str, Any]:
    """Return a command's parameter for each setting that has a flag, or is the ``rest`` after ``--``.

    ``by_variable`` are the keys of settings whose environment variable may replace the flag. ``every``: include the
    settings that servers take from a file only.
    """
    parameters = dict[str, Any]()
    for each in declared(kind):
        if each.key == rest:
            parameters[_name(each)] = VLLMArgs
        elif each.flag or (every and each.any_flag):
            # Values stay text: the decoder checks them, as for every other source.
            typed = bool if each.plain is bool else list[str] if each.is_list or each.is_mapping else str
            option = typer.Option(
                each.any_flag,
                help=each.help + (f" [default: {each.shown_default}]" if each.shown_default else ""),
                show_default=False,
                envvar=each.env if each.key in by_variable else None,
                rich_help_panel=each.setting.panel or None,
                metavar=each.shown_kind or None,
            )
            parameters[_name(each)] = Annotated[typed | None, option]
    return parameters


def flags_given(kind: type[Settings], given: Mapping[str, Any], rest: str = "") -> Source:
    """Return the given flags as a source; a missing flag is None or an empty list in ``given``."""
    of = {_name(each): each for each in declared(kind)}
    values = {
        of[name].key: key_values(value, of[name].any_flag) if of[name].is_mapping else value
        for name, value in given.items()
        if value is not None and value != []
    }
    names = {each.key: each.any_flag or each.key for each in of.values()} | {rest: VLLM_FLAGS}
    return Source(values, names=names)


def _name(of: Declared) -> str:
    return of.key.replace("-", "_")


# Variables that Kubernetes sets in every pod of a namespace for each service called tercet or tercet-SOMETHING.
_OF_SERVICES = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
_SERVICE = re.compile(r"(tcp|udp|sctp)://.*|[0-9a-fA-F.:]*|tcp|udp|sctp")
_TEST = "TERCET_TEST_"
_OF_COMMAND: Mapping[str, type[Settings]] = {"up": UpConfig, "router": RouterConfig}
# Packages whose settings are read from the environment too; those of vLLM's plugin and of measurements are not.
_READ_THEM = ("tercet.settings", "tercet.cluster")


def unknown_variables(command: str = "", environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line with a suggestion for each variable that is not read, or that ``command`` reads by another name."""
    known = _known(())
    kind = _of_package(command) if command in entry_points(SETTINGS) else _OF_COMMAND.get(command)
    by_rule = {
        VARIABLE_PREFIX + each.key.upper().replace("-", "_"): each.env for each in (declared(kind) if kind else ())
    }
    elsewhere = {name: env for name, env in by_rule.items() if name != env}  # variables with another name
    for name in sorted(environment):
        if not name.startswith(VARIABLE_PREFIX) or name.startswith(_TEST) or _is_of_a_service(name, environment):
            continue
        if name in elsewhere:
            yield f"{name} in the environment is ignored: tercet {command} reads {elsewhere[name]}"
            continue
        # Most environments have no such variable, and these imports would delay every start.
        if name not in known:  # only then settings of packages are imported
            known |= _known(map(_of_package, entry_points(SETTINGS)))
        if name in known:
            continue
        hint = near(name, sorted(known))
        meant = f"; {hint}" if hint.startswith("did you mean") else ""
        yield f"{name} in the environment is ignored: no setting has this name{meant}"


def _is_of_a_service(name: str, environment: Mapping[str, str]) -> bool:
    """True if Kubernetes set the variable: the value is part of an address, and the service's host variable exists."""
    if not _OF_SERVICES.fullmatch(name) or not _SERVICE.fullmatch(environment[name]):
        return False
    # NAME_PORT=tcp://...: only Kubernetes sets such values.
    if "://" in environment[name]:
        return True
    hosts = [each.removesuffix("_SERVICE_HOST") for each in environment if each.endswith("_SERVICE_HOST")]
    return any(name.startswith(f"{host}_") for host in hosts)


def _of_package(command: str) -> type[Settings]:
    return provided(SETTINGS, command, "", f"tercet {command}")


def _known(of_packages: Iterable[type[Settings]]) -> set[str]:
    kinds = (*of_packages, *(kind for kind in _kinds(Settings) if kind.__module__.startswith(_READ_THEM)))
    settings = {each.env for kind in kinds for each in declared(kind)}
    return settings | {each.name for each in VARIABLES} | INTERNAL | OF_COMMANDS | OF_TESTS


def _kinds(base: Any) -> Iterator[type[Settings]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
