"""Names that people, clients and other programs give: one rule for each kind of name, applied where it enters.

Names stand in URLs, headers, metrics, logs, command lines and in the state that routers share. So a name of an engine,
an adapter or a fleet that cannot be used in one of these places is refused where it enters, and not found there later:
each check raises :class:`~tercet.protocol.errors.BadRequest` that names the field.

Names that clients choose (ids of requests, sessions, users, salts) are not refused but bounded: a client decides
neither how many bytes a server keeps nor how many it logs or copies with each token. A longer name is replaced by its
beginning and a digest, so two long names that differ stay different.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from tercet.protocol.errors import BadRequest

Role = Literal["prefill", "decode", "both"]
LONGEST_NAME = 256
LONGEST_TEXT = 4096
LONGEST_UID = 256
_SHOWN = 60
_ENGINE = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9_.:\[\]-]*")
_ADAPTER = re.compile(r"\w[\w.:@+~-]*(/\w[\w.:@+~-]*)*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
LONGEST_KEPT = 128
"""Maximum characters of a name that is kept as its client wrote it."""
# Characters of a digest in a shortened name, and of the digest that stands for a client.
_DIGEST, _OWNER = 32, 16
# Maximum characters of a sequence's id: engines accept 256, and later attempts add a few characters.
LONGEST_ID = 200


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


def kept_name(name: str, longest: int = LONGEST_KEPT) -> str:
    """Return a client's name as it is kept, logged and passed on.

    It is the name itself, unless that has more than ``longest`` characters or characters that cannot be printed: then
    it is the beginning of the name, in ASCII, and a digest of the whole name, with at most ``longest`` characters.
    """
    if len(name) <= longest and name.isprintable():
        return name
    beginning = name[: longest - _DIGEST - 1]
    readable = "".join(each if each.isascii() and each.isprintable() else "_" for each in beginning)
    return f"{readable}-{_digest(name)[:_DIGEST]}"


def owned_name(name: str, headers: Mapping[str, str]) -> str:
    """Return a session's name among those of all clients: equal names of clients with different keys differ.

    The client is known by the key in its ``authorization`` header, which cannot be read from the result. All processes
    of a fleet return the same for the same client. Clients without a key are one client.
    """
    kept, key = kept_name(name), headers.get("authorization", "").partition(" ")[2]  # the scheme has any case
    return f"{kept}@{_digest(f'{len(key)} {key} {kept}')[:_OWNER]}" if key else kept


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sequence_id(request_id: str) -> str:
    """Return the id of a request's sequence on engines and in logs. The client may have chosen the request's id.

    It is the request's id, unless that is too long or not printable: then it is the beginning and a digest of the id.
    """
    return kept_name(request_id, LONGEST_ID)


def further_id(seq_id: str, number: int) -> str:
    """Return the id of a later attempt of the request ``seq_id``; numbers start at 1."""
    return f"{seq_id}.{number}"


def find_id(known: Iterable[str], wanted: str) -> str | None:
    """Return ``wanted`` if it is in ``known``, else the id of the last later attempt of that request, or None."""
    ids = list(known)
    if wanted in ids:
        return wanted
    return next((each for each in reversed(ids) if _is_further(each, wanted)), None)


def _is_further(seq_id: str, first: str) -> bool:
    number = seq_id[len(first) + 1 :]
    return seq_id.startswith(f"{first}.") and number.isascii() and number.isdecimal()
