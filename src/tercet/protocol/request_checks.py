"""What a server decides from a request's head alone: the form of its body.

Two readers of one body must not decide its form differently: a body that the first one does not read, and so does not
limit, would be read by the second one without a limit. So a request whose fields allow two readings is refused, and a
server passes a request on with the fields that :func:`labelled` returns, which allow only one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tercet.protocol.errors import BadRequest, UnsupportedMediaType
from tercet.protocol.headers import FILES, TRANSCRIBING
from tercet.protocol.wire import JSON, MSGPACK

MULTIPART = "multipart/form-data"
VERB_FORMS = (JSON, MSGPACK)
"""The forms of bodies that engines read in calls of verbs."""
UNKNOWN_BYTES = "application/octet-stream"
"""What HTTP libraries declare for bytes of an unknown type; it means the same as no declaration."""
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose bodies are read; no server reads a body of another method."""
CONTENT_TYPE, CONTENT_ENCODING = b"content-type", b"content-encoding"
_LENGTH, _TRANSFER, _HOST = b"content-length", b"transfer-encoding", b"host"
_DECIDING = frozenset({CONTENT_TYPE, CONTENT_ENCODING, _LENGTH, _TRANSFER, _HOST})
# The same names as text: :func:`labelled` decides by these fields, and passes on all others as they are.
DECIDING = frozenset(name.decode() for name in _DECIDING)
# One value of a list: it may have commas in quoted strings.
_ITEM = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SPACE = " \t"
Fields = Sequence[tuple[bytes, bytes]]


class Labelled(NamedTuple):
    """How a body is labelled: its media type, and the request's header fields."""

    form: str
    # They have no other meaning than the label.
    fields: list[tuple[bytes, bytes]]
    # The only one in the fields, and empty without one.
    content_type: str


def forms_of(path: str) -> Sequence[str]:
    """Return the forms of bodies that servers of the OpenAI API read at a path, the name of each in lower case."""
    if path == FILES:
        return (MULTIPART,)
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
        # What is passed on has one reading only: one content type, and no encoding.
        if known != CONTENT_ENCODING and (known != CONTENT_TYPE or len(said[known]) == 1):
            rest.append((name, value))
    # A body that is encoded, and two fields that disagree about that.
    encodings: dict[str, None] = {}
    for value in said[CONTENT_ENCODING]:
        given = [item.strip(_SPACE).lower() for item in value.split(",")]
        encodings[", ".join(name for name in given if name not in ("", "identity"))] = None
    _require_one(CONTENT_ENCODING, encodings)
    if encoding := "".join(encodings):
        why = f"must be identity, is {encoding:.80}: send the body without an encoding"
        raise UnsupportedMediaType(f"content-encoding: {why}", "content-encoding")
    transfers = dict.fromkeys(value.lower() for value in said[_TRANSFER])
    if said[_LENGTH] and transfers:
        why = "the request has a content-length, too; send one of them"
        raise BadRequest(f"transfer-encoding: {why}", _TRANSFER.decode())
    _require_one(_TRANSFER, transfers)
    if (transfer := "".join(transfers)) not in ("", "chunked"):
        raise UnsupportedMediaType(f"transfer-encoding: must be chunked, is {transfer:.80}", _TRANSFER.decode())
    for name in (_LENGTH, _HOST):
        _require_one(name, dict.fromkeys(said[name]))
    kinds: dict[str, None] = {}
    for item in (item.strip(_SPACE) for value in said[CONTENT_TYPE] for item in _ITEM.findall(value)):
        media, _, parameters = item.partition(";")
        media = media.strip(_SPACE).lower()
        if item:  # parameters have a meaning only in multipart bodies: the boundary
            kinds[f"{media}; {parameters.strip(_SPACE)}" if media == MULTIPART else media] = None
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


def _require_one(name: bytes, values: dict[str, None]) -> None:
    if len(values) > 1:
        first, second, *_ = (value or "identity" if name == CONTENT_ENCODING else value for value in values)
        field = name.decode()
        raise BadRequest(f"{field}: the request has two that disagree: {first:.80} and {second:.80}", field)


def require_json(fields: Fields) -> None:
    """Raise :class:`~tercet.protocol.errors.TercetError` for a body that is not declared as JSON.

    Some clients, such as aiohttp, declare ``application/octet-stream`` when they send no body. A page cannot send that
    type to another origin without a preflight request.
    """
    types = [value.strip().lower() for name, value in fields if name.lower() == CONTENT_TYPE]
    has_body = announces_body(fields)
    unknown = UNKNOWN_BYTES.encode()
    # A form without a declared type is what a page can send without a preflight request.
    if has_body and (not any(types) or unknown in types):
        named = unknown.decode() if any(types) else "nothing"
        raise UnsupportedMediaType(f"content-type: must be application/json, is {named}", "content-type")
    if has_body or types not in ([], [unknown]):
        labelled(fields, (JSON,))
