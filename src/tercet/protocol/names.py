"""Names that people and other programs give: one check for each kind of name, called wherever such a name enters.

Names stand in URLs, headers, metrics, logs, command lines and in the state that routers share. So a name that cannot be
used in one of these places is refused where it enters, and not found there later. Each check raises
:class:`~tercet.protocol.errors.BadRequest` that names the field.
"""

from __future__ import annotations

import re

from tercet.protocol.errors import BadRequest

LONGEST_NAME = 256
LONGEST_TEXT = 4096
LONGEST_UID = 256
_SHOWN = 60
_ENGINE = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9_.:\[\]-]*")
_ADAPTER = re.compile(r"\w[\w.:@+~-]*(/\w[\w.:@+~-]*)*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def require_engine_name(name: str, field: str = "name") -> None:
    """Check the name of an engine: letters and digits of ASCII, and ``. _ : - [ ]``, as in ``10.0.0.7:8001``."""
    _require(_ENGINE, name, field, "the name of an engine", "ASCII letters, digits and . _ : - [ ]", LONGEST_NAME)


def require_adapter_name(name: str, field: str = "name") -> None:
    """Check the name of a LoRA adapter, which requests give as their model, such as ``sql`` or ``team/sql:v2``."""
    _require(_ADAPTER, name, field, "the name of an adapter", "letters, digits and . _ : @ + ~ - /", LONGEST_NAME)


def require_fleet_name(name: str, field: str) -> None:
    """Check the name of a fleet on Ray; the names of its actors begin with it."""
    _require(_GROUP, name, field, "the name of a fleet", "ASCII letters, digits and . _ -", LONGEST_NAME)


def require_uid(uid: str, field: str = "uid", longest: int = LONGEST_UID) -> None:
    """Check the id of one start of an engine, which has at most ``longest`` characters."""
    _require(_UID, uid, field, "the id of a start", "ASCII letters, digits and . _ : -", longest)


def require_text(text: str, field: str, longest: int = LONGEST_TEXT) -> None:
    """Check a text that is shown in one line, such as a program's name or a path: no control characters, not empty."""
    if not text or len(text) > longest or not text.isprintable() or text != text.strip():
        raise BadRequest(
            f"{field}: must be 1 to {longest} printable characters without space at its ends, is {shown(text)}", field
        )


def shown(text: str) -> str:
    """Return the text for a message: quoted, escaped, and shortened if it is long."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def _require(pattern: re.Pattern[str], name: str, field: str, what: str, characters: str, longest: int) -> None:
    if len(name) > longest or pattern.fullmatch(name) is None:
        raise BadRequest(
            f"{field}: {shown(name)} cannot be {what}: use 1 to {longest} characters ({characters}), and begin with a "
            "letter or digit", field
        )  # fmt: skip
