"""Ids of sequences: a client's request keeps its own, what engines do for it later has others that begin with it."""

from __future__ import annotations

from collections.abc import Iterable


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
