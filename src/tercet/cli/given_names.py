"""Errors about values, renamed so that they begin with the flag or argument that gave the value."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from tercet.protocol import BadRequest
from tercet.settings import Settings, declared

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
