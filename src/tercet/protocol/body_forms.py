"""The form of a request's body: every server decides it by :func:`labelled`, from the header fields alone.

Two readers of one body must not decide differently: a body that the first one does not read, and so does not limit,
would be read by the second one without a limit. So a request whose fields allow two readings is refused, and a server
passes a request on with the fields that :func:`labelled` returns, which allow only one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tercet.protocol.errors import BadRequest, UnsupportedMediaType
from tercet.protocol.headers import TRANSCRIBING
from tercet.protocol.wire import JSON, MSGPACK

MULTIPART = "multipart/form-data"
VERB_FORMS = (JSON, MSGPACK)
"""The forms of bodies that engines read in calls of verbs."""
UNKNOWN_BYTES = "application/octet-stream"
"""What HTTP libraries declare for bytes of which they were told nothing; it means the same as no declaration."""
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose bodies are read; no server reads a body of another method."""
CONTENT_TYPE, CONTENT_ENCODING = b"content-type", b"content-encoding"
_LENGTH, _TRANSFER, _HOST = b"content-length", b"transfer-encoding", b"host"
_DECIDING = frozenset({CONTENT_TYPE, CONTENT_ENCODING, _LENGTH, _TRANSFER, _HOST})
# One value of a list: it may have commas in quoted strings.
_ITEM = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SPACE = " \t"
Fields = Sequence[tuple[bytes, bytes]]


class Labelled(NamedTuple):
    """The ``form`` of a body (its media type), and the request's header ``fields``, which have no other meaning.

    ``content_type`` is the only one in the fields, and empty without one.
    """

    form: str
    fields: list[tuple[bytes, bytes]]
    content_type: str


def forms_of(path: str) -> Sequence[str]:
    """Return the forms of bodies that servers of the OpenAI API read at a path, the name of each in lower case."""
    return (MULTIPART, JSON) if path in TRANSCRIBING else (JSON,)


def labelled(fields: Fields, forms: Sequence[str]) -> Labelled:
    """Decide the form of a request's body; ``forms`` are those that its route reads. Call it for requests with a body.

    A body without a ``content-type``, or of unknown bytes, has the first of the forms. The returned fields have at
    most one, and no ``content-encoding``: bodies with an encoding are refused.
    Raises :class:`~tercet.protocol.errors.BadRequest` for fields that disagree, and
    :class:`~tercet.protocol.errors.UnsupportedMediaType` for a form or an encoding that is not read; ``param`` is the
    name of the field.
    """
    said: dict[bytes, list[str]] = {name: [] for name in _DECIDING}
    rest: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        known = name.lower()
        if known in _DECIDING:
            said[known].append(value.decode("latin-1").strip(_SPACE))
        if known != CONTENT_ENCODING and (known != CONTENT_TYPE or len(said[known]) == 1):
            rest.append((name, value))
    _require_plain(said)
    for name in (_LENGTH, _HOST):
        _require_one(name, dict.fromkeys(said[name]))
    kinds = dict.fromkeys(_media_type(item) for value in said[CONTENT_TYPE] for item in _items(value))
    _require_one(CONTENT_TYPE, kinds)
    kind = next(iter(kinds), "")
    if kind == UNKNOWN_BYTES:
        kind = forms[0]
    form = kind.partition(";")[0] if kinds else forms[0]
    if form not in forms:
        raise UnsupportedMediaType(f"content-type: must be {' or '.join(forms)}, is {form:.80}", "content-type")
    passed = kind.encode("latin-1")
    return Labelled(form, [(name, passed if name.lower() == CONTENT_TYPE else value) for name, value in rest], kind)


def announces_body(fields: Fields) -> bool:
    """True if the fields of an HTTP/1.1 request announce a body."""
    return any(
        name.lower() == _TRANSFER or (name.lower() == _LENGTH and value.strip() != b"0") for name, value in fields
    )


def _require_plain(said: dict[bytes, list[str]]) -> None:
    """Raise for a body that is encoded, and for two fields that disagree about that."""
    encodings = dict.fromkeys(_encoding(value) for value in said[CONTENT_ENCODING])
    _require_one(CONTENT_ENCODING, encodings)
    if encoding := "".join(encodings):
        raise UnsupportedMediaType(
            f"content-encoding: must be identity, is {encoding:.80}: send the body without an encoding",
            "content-encoding",
        )
    transfers = dict.fromkeys(value.lower() for value in said[_TRANSFER])
    if said[_LENGTH] and transfers:
        raise BadRequest(
            "transfer-encoding: the request has a content-length, too; send one of them", _TRANSFER.decode()
        )
    _require_one(_TRANSFER, transfers)
    if (transfer := "".join(transfers)) not in ("", "chunked"):
        raise UnsupportedMediaType(f"transfer-encoding: must be chunked, is {transfer:.80}", _TRANSFER.decode())


def _require_one(name: bytes, values: dict[str, None]) -> None:
    if len(values) > 1:
        first, second, *_ = (value or "identity" if name == CONTENT_ENCODING else value for value in values)
        field = name.decode()
        raise BadRequest(f"{field}: the request has two that disagree: {first:.80} and {second:.80}", field)


def _encoding(value: str) -> str:
    """Return the encodings in a field's value, in one spelling; empty for none."""
    named = [item.strip(_SPACE).lower() for item in value.split(",")]
    return ", ".join(name for name in named if name not in ("", "identity"))


def _items(value: str) -> Iterable[str]:
    return filter(None, (item.strip(_SPACE) for item in _ITEM.findall(value)))


def _media_type(item: str) -> str:
    """Return a value of ``content-type`` in one spelling, with the parameters that have a meaning: multipart's."""
    name, _, parameters = item.partition(";")
    name = name.strip(_SPACE).lower()
    return f"{name}; {parameters.strip(_SPACE)}" if name == MULTIPART else name
