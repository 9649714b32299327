"""Recorded requests that a script gives as rows: mappings, or the rows of a data frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest
from tercet_lab.bench.workloads.conversations import (
    Conversation,
    ConversationTurn,
    Vocabulary,
    random_ids,
    refuse,
    replayed,
)
from tercet_lab.bench.workloads.recorded import LONGEST_RECORDED, block_text
from tercet_lab.block_tokens import BlockTokens
from tercet_lab.tables import Table

# The keys of a row; a run's table of requests has the others.
KEYS = {
    "at": ("at", "scheduled"),
    "input_tokens": ("input_tokens",),
    "output_tokens": ("wanted_tokens", "output_tokens"),
}


class Row(msgspec.Struct, frozen=True):
    """One request: its time (seconds), its lengths (tokens), and the ids of its first blocks."""

    at: float
    input_tokens: int
    output_tokens: int
    session: str = ""
    klass: str = ""
    prefix: tuple[int, ...] = ()


class RecordedRows(msgspec.Struct, frozen=True):
    """Requests in the order of their times; each id of a prefix represents ``block`` tokens."""

    rows: tuple[Row, ...]
    block: int

    def conversations(
        self, rate: float | None, count: int | None, vocabulary: Vocabulary, seed: int
    ) -> Iterator[Conversation]:
        """Yield the first ``count`` requests (None: all), as conversations in the order of their first requests.

        Times begin at 0, and are stretched to the mean ``rate`` unless it is None.
        """
        rows = self.rows[:count]
        refuse(count is not None and len(rows) < count, "requests", f"is {count}, and there are {len(rows)} rows")
        sessions: dict[str, list[tuple[float, Row]]] = {}
        for number, timed in enumerate(zip(replayed([row.at for row in rows], rate), rows, strict=True)):
            sessions.setdefault(f"+{timed[1].session}" if timed[1].session else str(number), []).append(timed)
        text = block_text(
            vocabulary, f"{seed} rows", self.block, max((i for row in rows for i in row.prefix), default=0)
        )
        content = Random(f"{seed} rows")
        for turns in sessions.values():
            found, said = list[ConversationTurn](), 0
            for at, row in turns:
                tokens: Sequence[int] = BlockTokens(
                    text, row.prefix, 0, min(row.input_tokens, len(row.prefix) * self.block)
                )
                more = row.input_tokens - said - len(tokens)
                if more:
                    tokens = (*tokens, *random_ids(vocabulary, more, content))
                found.append(ConversationTurn(tokens, row.output_tokens, due=at))
                said = row.input_tokens + row.output_tokens
            yield Conversation(tuple(found), offset=turns[0][0], klass=turns[0][1].klass)


def rows_of(given: Any, block: int) -> RecordedRows:
    """Return the rows of mappings, of a table, or of a data frame (pandas, polars, Arrow).

    Raise :class:`~tercet.protocol.BadRequest` that names the row and the key.
    """
    refuse(block < 1, "block", f"is {block}, and must be at least 1 token")
    if isinstance(given, Table):
        given = given.rows()
    elif hasattr(given, "to_dicts"):  # polars
        given = given.to_dicts()
    elif hasattr(given, "to_dict"):  # pandas
        given = given.to_dict("records")
    elif hasattr(given, "to_pylist"):  # Arrow
        given = given.to_pylist()
    if isinstance(given, Mapping | str) or not isinstance(given, Iterable):
        raise BadRequest("rows: must be a data frame, or mappings such as {'at': 0.5, 'input_tokens': 9}", "rows")
    rows = [_row(number, each, block) for number, each in enumerate(cast("Iterable[Any]", given))]
    refuse(not rows, "rows", "are empty; give at least one")
    said: dict[str, int] = {}
    order = sorted(range(len(rows)), key=lambda number: rows[number].at)
    for number in order:
        row = rows[number]
        before = said.get(row.session, 0) if row.session else 0
        if before and row.prefix:
            raise _wrong(number, "prefix", f"session {row.session} has begun; only its first row has a prefix")
        if before and row.input_tokens <= before:
            why = f"is {row.input_tokens}, and must exceed {before}, the prompt and the answer before in its session"
            raise _wrong(number, "input_tokens", why)
        said[row.session] = row.input_tokens + row.output_tokens
    return RecordedRows(tuple(rows[number] for number in order), block)


def _wrong(number: int, key: str, why: str) -> BadRequest:
    return BadRequest(f"rows: row {number}: {key}: {why}", key)


def _row(number: int, given: Any, block: int) -> Row:
    if not isinstance(given, Mapping):
        raise BadRequest(f"rows: row {number} is {given!r:.40}, and must be a mapping", "rows")
    known = {str(name): value for name, value in cast("Mapping[Any, Any]", given).items()}
    values: dict[str, float] = {}
    for key, names in KEYS.items():
        value = next((known[name] for name in names if not _unknown(known.get(name))), None)
        if value is None:
            raise _wrong(number, key, "is missing; each row needs it")
        try:
            values[key] = float(value)
        except (TypeError, ValueError) as error:
            raise _wrong(number, key, f"is {value!r:.40}, and must be a number") from error
    if not math.isfinite(values["at"]):
        raise _wrong(number, "at", f"is {values['at']}, and must be a time in seconds")
    for key in ("input_tokens", "output_tokens"):
        if not 1 <= values[key] <= LONGEST_RECORDED or values[key] != int(values[key]):
            raise _wrong(
                number, key, f"is {values[key]:g}, and must be a whole number of at least 1; leave the row out"
            )
    prefix = known.get("prefix")
    try:
        ids = () if _unknown(prefix) else tuple(int(each) for each in cast("Iterable[Any]", prefix))
    except (TypeError, ValueError) as error:
        raise _wrong(number, "prefix", f"is {prefix!r:.40}, and must be a list of ids of blocks") from error
    if any(not 0 <= each < 2**63 for each in ids):
        raise _wrong(number, "prefix", "an id must be 0 or more, and less than 2**63")
    if (len(ids) - 1) * block >= values["input_tokens"]:
        longer = f"has {len(ids)} blocks of {block} tokens, more than input_tokens, {values['input_tokens']:g}"
        raise _wrong(number, "prefix", f"{longer}; give fewer ids, or the right block")
    session, klass = ("" if _unknown(known.get(name)) else str(known[name]) for name in ("session", "klass"))
    return Row(values["at"], int(values["input_tokens"]), int(values["output_tokens"]), session, klass, ids)


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
