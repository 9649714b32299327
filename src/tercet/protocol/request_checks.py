"""What a server decides from a request's head alone: the form of its body, and whether a web page may have sent it.

Two readers of one body must not decide its form differently: a body that the first one does not read, and so does not
limit, would be read by the second one without a limit. So a request whose fields allow two readings is refused, and a
server passes a request on with the fields that :func:`labelled` returns, which allow only one.

A page of any origin can make a browser send requests to any address that the browser reaches, loopback included. Some
are sent without a preflight request, and under a host name of the page's owner (DNS rebinding) they count as the page's
own origin. Such a request cannot leave out or choose ``Host``, ``Origin`` and ``Sec-Fetch-Site``, and cannot have the
type JSON without a preflight. So an operator's requests to change a fleet are accepted, and those of pages are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from tercet.protocol.errors import BadRequest, Forbidden, UnsupportedMediaType
from tercet.protocol.headers import FILES, TRANSCRIBING
from tercet.protocol.names import ip_of
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
# The same names as text: :func:`labelled` decides by these fields, and passes on all others as they are.
DECIDING = frozenset(name.decode() for name in _DECIDING)
# One value of a list: it may have commas in quoted strings.
_ITEM = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SPACE = " \t"
Fields = Sequence[tuple[bytes, bytes]]
# A browser's values for requests of the same origin, and for addresses that its user typed.
_OWN_SITES = frozenset({"same-origin", "none"})
# Types that pages may send to other origins without a preflight request.
_UNASKED = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
# A proxy adds one of these headers, or one that begins with the prefix, to requests that it forwards.
_OF_PROXIES = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"})
_PROXY_PREFIX = "x-forwarded"


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


class ShownHeaders:
    """The headers of one request by name; each may occur several times."""

    def __init__(self, headers: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in headers:
            self._values.setdefault(name.lower(), []).append(value)

    @classmethod
    def of_asgi(cls, headers: Iterable[tuple[bytes, bytes]]) -> ShownHeaders:
        return cls((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)

    def all(self, name: str) -> Sequence[str]:
        """Return the values of the header with this lower-case name."""
        return self._values.get(name, ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


def require_no_page(headers: ShownHeaders) -> None:
    """Raise :class:`~tercet.protocol.errors.Forbidden` for a request that a page of another origin caused."""
    sites = headers.all("sec-fetch-site")
    if any(site.strip().lower() not in _OWN_SITES for site in sites):
        raise Forbidden(
            f"sec-fetch-site: a web page of another origin sent this request ({sites[0]:.40})", "sec-fetch-site"
        )
    origins, hosts = headers.all("origin"), headers.all("host")
    if origins and (len(origins) > 1 or len(hosts) != 1 or not _is_same(origins[0], hosts[0])):
        raise Forbidden(f"origin: a web page of another origin sent this request ({origins[0]:.80})", "origin")


def require_this_machine(headers: ShownHeaders, peer: str | None, remedy: str = "") -> None:
    """Raise :class:`~tercet.protocol.errors.Forbidden` unless a process of this machine makes the request itself.

    This one check decides what is open to this machine where no key is required. ``peer`` is the caller's address; None
    for a socket file. Refused are other machines, web pages, and requests that a proxy forwards, for their sender is
    not known. The host must be a loopback name: the owner of a web page can make another name lead to this machine (DNS
    rebinding). ``remedy`` ends the errors about callers.
    """
    _require_direct(headers, peer, remedy)
    _require_local_host(headers)


def require_own_call(headers: ShownHeaders, peer: str | None) -> None:
    """Raise :class:`~tercet.protocol.TercetError` unless a process of this machine makes this call of a verb itself.

    As :func:`require_this_machine`, but names are not checked at a socket file, to which no web page connects. Types of
    bodies that a page can send unasked are refused, too.
    """
    _require_direct(headers, peer, "")
    if peer is not None:
        _require_local_host(headers)
    for each in (value.partition(";")[0].strip().lower() for value in headers.all("content-type")):
        if each in _UNASKED:
            raise UnsupportedMediaType(f"content-type: must be application/json, is {each}", "content-type")


def _require_direct(headers: ShownHeaders, peer: str | None, remedy: str) -> None:
    require_no_page(headers)
    more = remedy and f"; {remedy}"
    if peer is not None and not is_loopback_address(peer):
        raise Forbidden(f"without a key, this route accepts requests from this machine only{more}")
    if proxy := next((name for name in headers if name in _OF_PROXIES or name.startswith(_PROXY_PREFIX)), ""):
        raise Forbidden(f"{proxy}: this server has no key, so it refuses requests through a proxy{more}", proxy)


def _require_local_host(headers: ShownHeaders) -> None:
    hosts = headers.all("host")
    name = _name_in(hosts[0]) if len(hosts) == 1 else ""
    if name.rstrip(".").lower() != "localhost" and not is_loopback_address(name):  # no DNS lookup: see rebinding above
        raise Forbidden("host: must be localhost, 127.0.0.1 or [::1], because this server has no key", "host")


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


def is_loopback_address(text: str) -> bool:
    """True if an address, which may have a zone, reaches this machine only."""
    address = ip_of(text.partition("%")[0])
    return address is not None and address.is_loopback


def _name_in(host: str) -> str:
    """Return the name in a Host header, without its port; empty if the header is not valid."""
    try:
        parts = urlsplit(f"//{host.strip()}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host.strip() and "@" not in parts.netloc else ""


def _is_same(origin: str, host: str) -> bool:
    """True if an Origin header has the host that the request names."""
    scheme, _, place = origin.strip().lower().partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme)
    if default is None or not place:
        return False
    wanted = host.strip().lower()
    return place.removesuffix(default) == wanted.removesuffix(default)
