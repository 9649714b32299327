"""What is wrong with a value is said of the flag or argument by which it is given."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from tercet.protocol import BadRequest
from tercet.settings import Settings, declared

# Of settings whose parts are checked where they are used, under names of their own.
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


def flags_of(kind: type[Settings]) -> dict[str, str]:
    """The flag of each setting, by its key."""
    return {each.key: each.flag for each in declared(kind) if each.flag}


def require_url(given: str, name: str, example: str) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` for what is no http or https URL with a host, and a port if any."""
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is no number
        is_url = False
    if not is_url:
        raise BadRequest(f"{name}: {given!r} is not a URL such as {example}", name)
