"""Header fields as bytes, in their order: which of them a proxy passes on (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Fields = Sequence[tuple[bytes, bytes]]
"""Names as they were written, in any case, and values without the white space around them."""

HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"transfer-encoding", b"upgrade"}
)  # fmt: skip
# How long a message is: whoever sends it on says that again, in its own way.
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
# What must be known before the body, and may be no trailer (RFC 9110, 6.5.1).
NO_TRAILERS = frozenset(
    {b"age", b"authorization", b"cache-control", b"content-encoding", b"content-range", b"content-type", b"cookie",
     b"date", b"expect", b"expires", b"host", b"if-match", b"if-modified-since", b"if-none-match", b"if-range",
     b"if-unmodified-since", b"location", b"max-forwards", b"origin", b"pragma", b"range", b"retry-after",
     b"set-cookie", b"trailer", b"vary", b"warning", b"www-authenticate", b"x-request-id"}
)  # fmt: skip


def values(fields: Fields, name: bytes) -> list[bytes]:
    """Of all fields of that name, which is in lower case."""
    return [value for each, value in fields if each.lower() == name]


def first(fields: Fields, name: bytes) -> str | None:
    """The first value, one character per byte; None without one."""
    return next((value.decode("latin-1") for each, value in fields if each.lower() == name), None)


def end_to_end(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Those that go on: neither the next hop's own, nor named by ``Connection``, nor framing, nor in ``but``."""
    dropped = HOP_BY_HOP | FRAMING | _named_by_connection(fields) | set(but)
    return [(name, value) for name, value in fields if name.lower() not in dropped]


def passed_on(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The same, with what says how a message is framed in its place, for a message whose body goes on as it comes."""
    dropped = (HOP_BY_HOP | _named_by_connection(fields) | set(but)) - FRAMING
    found, seen = list[tuple[bytes, bytes]](), set[bytes]()
    for name, value in fields:
        known = name.lower()
        if known in dropped or known in seen:
            continue
        if known in FRAMING:  # h11 has refused those that say two things
            seen.add(known)
        found.append((name, value))
    return found


def passed_trailers(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Trailers that go on: those that may be some. Servers exist that take a late field for one of the head."""
    return end_to_end(fields, NO_TRAILERS | set(but))


def _named_by_connection(fields: Fields) -> set[bytes]:
    return {each.strip().lower() for value in values(fields, b"connection") for each in value.split(b",")}


def is_encoded(fields: Fields) -> bool:
    """Whether the content is compressed, or otherwise not what its type says."""
    return any(value.strip().lower() not in (b"", b"identity") for value in values(fields, b"content-encoding"))
