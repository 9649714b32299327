"""Commands whose flags are settings, each declared once in :mod:`tercet.settings`, and flags of other commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tercet.cli.flag_records import taking
from tercet.cli.given_names import PARTS, SETTINGS_OF, flags_of, given_as
from tercet.cli.settings_help import help_all
from tercet.settings import (
    Declared,
    Settings,
    Source,
    declared,
    decode_settings,
    from_environment,
    key_values,
    read_yaml,
)

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
            told = {flag.name: given.pop(flag.name) for flag in flags}
            command(**given, **{last.name: decode_settings(kind, flags_given(kind, told))})

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
    return {
        _name(each): VLLMArgs if each.key == rest else _annotation(each, each.key in by_variable)
        for each in declared(kind)
        if each.flag or each.key == rest or (every and each.any_flag)
    }


def _annotation(of: Declared, by_variable: bool) -> Any:
    """Return a parameter's annotation. Values stay text: the decoder checks them, as for every other source."""
    default = f" [default: {of.shown_default}]" if of.shown_default else ""
    several = of.is_list or of.is_mapping
    kind = bool if of.plain is bool else list[str] if several else str
    option = typer.Option(
        of.any_flag,
        help=of.help + default,
        show_default=False,
        envvar=of.env if by_variable else None,
        rich_help_panel=of.setting.panel or None,
        metavar=of.shown_kind or None,
    )
    return Annotated[kind | None, option]


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
