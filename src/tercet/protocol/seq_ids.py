"""Ids of sequences: a client's request keeps its id, and later attempts get ids that begin with it."""

from __future__ import annotations

from collections.abc import Iterable

from tercet.protocol.names import kept_name

# Maximum characters of a sequence's id: engines accept 256, and later attempts add a few characters.
LONGEST_ID = 200


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
