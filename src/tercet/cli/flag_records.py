"""Commands that take several flags as one record: a dataclass whose fields are typer's options and arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tercet.protocol import BadRequest


def flags_as_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with a flag for each field of its parameters that are dataclasses, in the place of these.

    A call makes the records from the flags.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    records: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    flags = {name: inspect.signature(kind, eval_str=True).parameters for name, kind in records.items()}

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
