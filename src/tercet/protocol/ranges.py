"""Half-open token ranges, and the forms in which a caller may write their ends."""

from __future__ import annotations

from tercet.protocol.errors import BadRequest


def resolve_end(length: int, end: int | None) -> int:
    """Return the absolute end of ``prompt[:end]``: None means the whole prompt, a negative end counts from its end.

    Raises :class:`BadRequest` if it is outside ``[0, length]``.
    """
    resolved = length if end is None else end + length if end < 0 else end
    if not 0 <= resolved <= length:
        raise BadRequest(f"end: {end} is outside the prompt, which has {length} tokens", "end")
    return resolved


def resolve_range(length: int, begin: int, end: int | None) -> tuple[int, int]:
    """Return the absolute ``[begin, end)`` within a prompt of ``length`` tokens.

    Raises :class:`BadRequest` for a negative ``begin`` or an empty or backward range.
    """
    resolved = resolve_end(length, end)
    if begin < 0:
        raise BadRequest(f"begin: {begin} is negative; only end may count from the prompt's end", "begin")
    if begin >= resolved:
        raise BadRequest(f"begin: {begin} must be less than the end, which is {resolved}", "begin")
    return begin, resolved
