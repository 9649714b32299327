"""The requests of one batch: the lines of its file, checked; those that have ended, and their results in order.

Each line is a JSON object with ``custom_id``, ``method``, ``url`` and ``body``, as for OpenAI's batches and vLLM's
``run_batch``. A result has the ``custom_id`` of its line and either a ``response`` or an ``error``.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tercet.protocol.headers import CHAT, COMPLETIONS, POOLING, RESPONSES
from tercet.protocol.json_text import UNREADABLE, in_utf8
from tercet.protocol.names import kept_name
from tercet.router.batches.batch_files import AskedBatch, Counts, LineFault

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, *sorted(POOLING))
"""The routes that the lines of a batch may name."""
# Lines of one file, and faults that a failed batch shows.
MOST_LINES, MOST_FAULTS = 50_000, 100
LONGEST_ID = 512


class Line(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Result(msgspec.Struct, frozen=True, array_like=True):
    """What came of one line: its index (from 0), whether it succeeded, and its line of the output file."""

    index: int
    succeeded: bool
    text: msgspec.Raw


class BadLines(Exception):
    """The lines of a file that are not valid."""

    def __init__(self, faults: Iterable[LineFault]) -> None:
        super().__init__("the batch's file is not valid")
        self.faults = tuple(faults)


_LINE, _RESULT = msgspec.json.Decoder(Line), msgspec.json.Decoder(Result)
_ENCODER = msgspec.json.Encoder()


class Lines:
    """The lines of a batch that have not ended, by index. Reads are blocking: call the methods in a thread."""

    def __init__(self, path: Path, asked: AskedBatch, results: Path) -> None:
        """Check the whole file, and leave out the lines whose results are known. Raise :class:`BadLines`."""
        self._path = path
        self._offsets = _checked(path, asked.endpoint)
        done = dict[int, bool]()
        for result in known_results(results):
            done.setdefault(result.index, result.succeeded)
        self.left = deque(index for index in range(len(self)) if index not in done)
        self.counts = Counts(len(self), sum(done.values()), len(done) - sum(done.values()))

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> Line:
        """Return one line."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return _LINE.decode(in_utf8(file.readline()))


def _checked(path: Path, endpoint: str) -> list[int]:
    """Return the offset of each line; blank lines do not count."""
    offsets, faults, named = list[int](), list[LineFault](), set[str]()
    with path.open("rb") as file:
        at = 0
        for number, text in enumerate(file, 1):
            if text.strip():
                if (fault := _fault_of(text, number, endpoint, named)) is not None:
                    faults.append(fault)
                offsets.append(at)
            at += len(text)
            if len(faults) >= MOST_FAULTS or len(offsets) > MOST_LINES:
                break
    if len(offsets) > MOST_LINES:
        faults.append(LineFault("too_many_lines", None, f"the file has more than {MOST_LINES} requests; split it"))
    if not offsets:
        faults.append(LineFault("empty_file", None, "the file has no requests; write one JSON object on each line"))
    if faults:
        raise BadLines(faults)
    return offsets


def _fault_of(text: bytes, number: int, endpoint: str, named: set[str]) -> LineFault | None:
    try:
        line = _LINE.decode(in_utf8(text))
    except UNREADABLE as error:
        return LineFault("invalid_json_line", number, f"must be a JSON object of a request: {error}"[:300])
    if not line.custom_id or len(line.custom_id) > LONGEST_ID:
        return LineFault("invalid_custom_id", number, f"must have 1 to {LONGEST_ID} characters", "custom_id")
    if line.custom_id in named:
        return LineFault("duplicate_custom_id", number, f"{kept_name(line.custom_id)} is used twice", "custom_id")
    named.add(line.custom_id)
    if line.method != "POST":
        return LineFault("invalid_method", number, f"must be POST, is {line.method:.40}", "method")
    if line.url != endpoint:
        return LineFault("mismatched_url", number, f"must be the batch's endpoint {endpoint}, is {line.url:.80}", "url")
    if line.body.get("stream"):
        return LineFault("invalid_body", number, "results of a batch are whole: leave stream out", "body.stream")
    return None


# ---- results ---------------------------------------------------------------------------------------------------------


def answered(index: int, line: Line, status: int, request_id: str, body: bytes) -> bytes:
    """Return the record of an answer, which ends with a line break."""
    try:
        content: Any = msgspec.Raw(body) if msgspec.json.decode(body) is not None else None
    except UNREADABLE:
        content = body.decode("utf-8", "replace")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return _recorded(index, status < 400, line.custom_id, response, None)


def unanswered(index: int, line: Line, code: str, message: str) -> bytes:
    """Return the record of a line that got no answer."""
    return _recorded(index, False, line.custom_id, None, {"code": code, "message": message})


def _recorded(
    index: int, succeeded: bool, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, str] | None
) -> bytes:
    found = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": response, "error": error}
    return _ENCODER.encode(Result(index, succeeded, msgspec.Raw(_ENCODER.encode(found)))) + b"\n"


def known_results(path: Path) -> Iterator[Result]:
    """Yield the results in a file; first cut off a last line that a crash has left incomplete."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        _cut_incomplete(file)
        file.seek(0)
        yield from (result for _, result in _results_in(file))


def _results_in(file: BinaryIO) -> Iterator[tuple[int, Result]]:
    """Yield each result of a file with its place; a line that a power cut has spoilt is left out, and made again."""
    at = 0
    for text in file:
        with suppress(*UNREADABLE):
            yield at, _RESULT.decode(text)
        at += len(text)


def _cut_incomplete(file: BinaryIO) -> None:
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 1024 * 1024)
        file.seek(begin)
        part = file.read(end - begin)
        if (found := part.rfind(b"\n")) >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        file.truncate(end)


def write_in_order(results: Path, output: Path, errors: Path) -> tuple[int, int]:
    """Write the lines of the output file and of the error file, each in the order of the input; return their numbers.

    One line is in memory at a time. Of two results of one line, the first one counts.
    """
    found: dict[int, tuple[int, bool]] = {}
    with results.open("rb") as file:
        for at, result in _results_in(file):
            found.setdefault(result.index, (at, result.succeeded))
        numbers = [0, 0]
        with output.open("wb") as good, errors.open("wb") as bad:
            for _, (offset, succeeded) in sorted(found.items()):
                file.seek(offset)
                (good if succeeded else bad).write(bytes(_RESULT.decode(file.readline()).text) + b"\n")
                numbers[not succeeded] += 1
    return numbers[0], numbers[1]
