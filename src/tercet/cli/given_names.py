"""What is wrong with a value is said of the flag or argument by which it is given."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from tercet.protocol import BadRequest
from tercet.settings import Settings, declared

# The attribute of a command's function that has the class of its settings.
SETTINGS_OF = "settings_kind"
# Of settings whose parts are checked where they are used, under other names.
PARTS: Mapping[str, str] = {"args": "--program-arg", "profile": "--simulate", "engine options": "--option"}


@contextmanager
def given_as(names: Mapping[str, str]) -> Generator[None]:
    """A :class:`~tercet.protocol.BadRequest` that begins with one of these names has what it stands for instead."""
    try:
        yield
    except BadRequest as error:
        name, colon, what = error.message.partition(":")
        if colon and name in names:
            raise BadRequest(f"{names[name]}:{what}", names[name]) from error
        raise


def kind_of(command: Any) -> type[Settings] | None:
    """The settings that are the flags of a command of the command line; None if it has others."""
    return getattr(command.callback, SETTINGS_OF, None)


def flags_of(kind: type[Settings]) -> dict[str, str]:
    """The flag of each setting, by its key."""
    return {each.key: each.flag for each in declared(kind) if each.flag}
