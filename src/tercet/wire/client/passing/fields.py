"""Header fields as bytes, in order, and the choice of those that a proxy passes on (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Fields = Sequence[tuple[bytes, bytes]]
"""Header fields: names as they were written, in any case, and values without surrounding white space."""

HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"transfer-encoding", b"upgrade"}
)  # fmt: skip
# Fields for the length of a message: each sender sets them again.
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
# Fields that must be known before the body, and may not be trailers (RFC 9110, 6.5.1).
NO_TRAILERS = frozenset(
    {b"age", b"authorization", b"cache-control", b"content-encoding", b"content-range", b"content-type", b"cookie",
     b"date", b"expect", b"expires", b"host", b"if-match", b"if-modified-since", b"if-none-match", b"if-range",
     b"if-unmodified-since", b"location", b"max-forwards", b"origin", b"pragma", b"range", b"retry-after",
     b"set-cookie", b"trailer", b"vary", b"warning", b"www-authenticate", b"x-request-id"}
)  # fmt: skip


def values(fields: Fields, name: bytes) -> list[bytes]:
    """Return the values of all fields with that lower-case name."""
    return [value for each, value in fields if each.lower() == name]


def first(fields: Fields, name: bytes) -> str | None:
    """Return the first value of a field, one character per byte; None without one."""
    return next((value.decode("latin-1") for each, value in fields if each.lower() == name), None)


def end_to_end(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the fields that a proxy passes on.

    Left out are fields for the next hop, fields named by ``Connection``, fields of framing, and those in ``but``.
    """
    dropped = HOP_BY_HOP | FRAMING | _named_by_connection(fields) | set(but)
    return [(name, value) for name, value in fields if name.lower() not in dropped]


def passed_on(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the fields of :func:`end_to_end` and of framing, for a message whose body is passed on as it arrives."""
    dropped = (HOP_BY_HOP | _named_by_connection(fields) | set(but)) - FRAMING
    found, seen = list[tuple[bytes, bytes]](), set[bytes]()
    for name, value in fields:
        known = name.lower()
        if known in dropped or known in seen:
            continue
        if known in FRAMING:  # h11 has refused contradictory fields
            seen.add(known)
        found.append((name, value))
    return found


def with_forwarder(fields: Fields, peer: str, host: bytes, scheme: str, version: bytes) -> list[tuple[bytes, bytes]]:
    """Return the fields with those by which a proxy says that it forwards a request (RFC 9110, 7.6.3; RFC 7239).

    ``peer`` is the address of the client, empty if it is not known; ``host``, ``scheme`` and ``version`` are those of
    its request. They follow what the client itself said in such fields: the last values are the ones to believe.
    """
    node = (peer or "unknown").encode()
    told = b"for=" + (b'"[%b]"' % node if b":" in node else node) + b";proto=" + scheme.encode()
    if host:
        told += b';host="%b"' % host.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    chain = b", ".join([*values(fields, b"x-forwarded-for"), node])
    kept = [(name, value) for name, value in fields if name.lower() != b"x-forwarded-for"]
    return [*kept, (b"X-Forwarded-For", chain), (b"Forwarded", told), (b"Via", version + b" tercet")]


def passed_trailers(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the trailers that a proxy passes on.

    Some fields are not allowed as trailers, since some servers treat a trailer like a header field.
    """
    return end_to_end(fields, NO_TRAILERS | set(but))


def _named_by_connection(fields: Fields) -> set[bytes]:
    return {each.strip().lower() for value in values(fields, b"connection") for each in value.split(b",")}


def is_encoded(fields: Fields) -> bool:
    """True if the content is compressed, or encoded otherwise."""
    return any(value.strip().lower() not in (b"", b"identity") for value in values(fields, b"content-encoding"))
