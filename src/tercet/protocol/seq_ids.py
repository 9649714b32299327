"""Ids of sequences: a client's request keeps its own, what engines do for it later has others that begin with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

# Characters of a sequence's id: engines take 256, and what they do later adds a few to it.
LONGEST_ID = 200
# Of a longer one, what is kept to know it by in logs.
KEPT = 64


def sequence_id(request_id: str) -> str:
    """What a sequence is called on engines and in logs, whose request has an id that its client may have chosen.

    It is the same, unless that is too long or cannot be printed: then it is its beginning and a digest of all of it.
    """
    if len(request_id) <= LONGEST_ID and request_id.isprintable():
        return request_id
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{''.join(each if each.isprintable() else '_' for each in request_id[:KEPT])}-{digest}"


def further_id(seq_id: str, number: int) -> str:
    """Another id for the sequence of that request; numbers begin with 1."""
    return f"{seq_id}.{number}"


def find_id(known: Iterable[str], wanted: str) -> str | None:
    """The id among those ``known`` that is ``wanted``, else the last of those that a request of that id got later."""
    ids = list(known)
    if wanted in ids:
        return wanted
    return next((each for each in reversed(ids) if _is_further(each, wanted)), None)


def _is_further(seq_id: str, first: str) -> bool:
    number = seq_id[len(first) + 1 :]
    return seq_id.startswith(f"{first}.") and number.isascii() and number.isdecimal()
