"""The files and batches of a router, in one directory; what is here survives the router.

::

    DIR/lock                    locked by the router process that runs batches
    DIR/files/file-1f.json      FileRecord
    DIR/files/file-1f           contents
    DIR/batches/batch_2a/
        asked.json              AskedBatch: written once, by the process that accepted it
        cancel                  exists once a client has cancelled the batch
        state.json              BatchState: written by the process that runs batches, and by no other
        results                 one line for each request that has ended, in the order of their ends

So every file has one writer, and several router processes may share the directory. A router that starts again reads
``results`` and runs only the requests that are not in it. The methods do file I/O: call them in a thread.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tercet.aio.files import read_whole, write_whole
from tercet.protocol import BadRequest, Conflict, RequestTooLarge, UnknownPath
from tercet.protocol.json_text import UNREADABLE
from tercet.router.state.state_store import FileTurn

logger = logging.getLogger("tercet.router")
T = TypeVar("T")
# A file that is not deleted ends by itself, as OpenAI's files of batches do.
KEPT_SECONDS = 30 * 24 * 3600
# One client may use this share of the storage, so that a single one cannot shut out the others.
SHARE_OF_ONE = 0.5
# Batches of one client that have not ended.
MOST_OPEN = 100
# Longest metadata and names, as in OpenAI's API.
MOST_METADATA, LONGEST_METADATA, LONGEST_NAME = 16, 512, 255
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}", re.ASCII)

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file. ``owner`` is a digest of its client's key, empty on a router without keys; times are Unix seconds."""

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's form of the file."""
        found = {name: getattr(self, name) for name in self.__struct_fields__ if name != "owner"}
        return {**found, "object": "file", "status": "processed", "status_details": None}


class AskedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as its client asked for it."""

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None


class LineFault(msgspec.Struct, frozen=True):
    """Why a batch failed: a line of its file (from 1) that is not valid."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Numbers of requests: all, those that succeeded, and those that failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch has come; the times are Unix seconds."""

    status: Status = "validating"
    counts: Counts = Counts()
    errors: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    def now(self, status: Status, at: float, **changes: Any) -> BatchState:
        """Return the state after a change of ``status`` at a time."""
        return msgspec.structs.replace(self, status=status, **{f"{status}_at": int(at)}, **changes)


class Batch(msgspec.Struct, frozen=True):
    """A batch, and how far it has come."""

    asked: AskedBatch
    state: BatchState
    is_cancelled: bool

    @property
    def has_ended(self) -> bool:
        return self.state.status in ENDED

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's form of the batch."""
        asked, state = self.asked, msgspec.to_builtins(self.state)
        counts, errors = state.pop("counts"), state.pop("errors")
        if self.is_cancelled and not self.has_ended:
            state["status"] = "cancelling"
        return {
            **state, "id": asked.id, "object": "batch", "endpoint": asked.endpoint,
            "input_file_id": asked.input_file_id, "completion_window": asked.completion_window,
            "created_at": asked.created_at, "expires_at": asked.expires_at, "metadata": asked.metadata,
            "request_counts": counts, "errors": {"object": "list", "data": errors} if errors else None,
        }  # fmt: skip


class BatchFiles:
    """The directory of files and batches; contents take at most ``most_bytes``. Who holds its ``turn`` runs batches.

    Raises ``OSError`` if the directory cannot be made or written.
    """

    def __init__(self, directory: Path, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory.expanduser().absolute()
        self._files, self._batches = self._directory / "files", self._directory / "batches"
        self._most_bytes, self.clock = most_bytes, clock
        for each in (self._files, self._batches):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.turn = FileTurn(self._directory / "lock")

    # ---- files ---------------------------------------------------------------------------------------------------

    def add_file(self, owner: str, filename: str, content: bytes) -> FileRecord:
        """Keep a file. Raise :class:`~tercet.protocol.RequestTooLarge` if the storage has no room for it."""
        if self.without_room([owner], len(content)):
            raise RequestTooLarge(
                f"file: the storage of batches is full, at most {self._most_bytes} bytes (batch-storage), of which "
                f"one client may use {SHARE_OF_ONE:.0%}; delete files that you no longer need",
                "file",
            )
        file_id = f"file-{secrets.token_hex(16)}"
        write_whole(self._files / file_id, content)
        return self._recorded(file_id, owner, filename, len(content), "batch")

    def adopt_file(self, owner: str, filename: str, path: Path) -> FileRecord:
        """Keep the results that were written to ``path``, which is on the same file system."""
        file_id, size = f"file-{secrets.token_hex(16)}", path.stat().st_size
        path.rename(self._files / file_id)
        return self._recorded(file_id, owner, filename, size, "batch_output")

    def _recorded(
        self, file_id: str, owner: str, filename: str, size: int, purpose: Literal["batch", "batch_output"]
    ) -> FileRecord:
        now = int(self.clock())
        record = FileRecord(
            id=file_id, owner=owner, bytes=size, created_at=now, expires_at=now + KEPT_SECONDS,
            filename=filename[:LONGEST_NAME], purpose=purpose,
        )  # fmt: skip
        # The record comes last: contents without one are the rest of a write that was cut off.
        write_whole(self._files / f"{file_id}.json", msgspec.json.encode(record))
        return record

    def file(self, owner: str, file_id: str) -> FileRecord:
        """Return a client's file; raise :class:`~tercet.protocol.UnknownPath` if it has none of that id."""
        record = _read(self._files / f"{file_id}.json", FileRecord) if _ID.fullmatch(file_id) else None
        if record is None or record.owner != owner or record.expires_at <= self.clock():
            raise UnknownPath(f"file_id: there is no file {file_id:.80}; GET /v1/files lists your files", "file_id")
        return record

    def content_path(self, record: FileRecord) -> Path:
        return self._files / record.id

    def files(self, owner: str) -> list[FileRecord]:
        """Return a client's files, newest first."""
        found = [each for each in self._all_files() if each.owner == owner and each.expires_at > self.clock()]
        return sorted(found, key=lambda each: (each.created_at, each.id), reverse=True)

    def _all_files(self) -> Iterator[FileRecord]:
        for path in self._files.glob("file-*.json"):
            if (record := _read(path, FileRecord)) is not None:
                yield record

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. Raise :class:`~tercet.protocol.Conflict` while a batch still reads it."""
        record = self.file(owner, file_id)
        for batch in self.batches(owner):
            if batch.asked.input_file_id == file_id and not batch.has_ended:
                raise Conflict(f"file_id: batch {batch.asked.id} still reads this file; cancel it first", "file_id")
        self._remove(record.id)

    def _remove(self, file_id: str) -> None:
        for name in (f"{file_id}.json", file_id):
            with suppress(FileNotFoundError):
                (self._files / name).unlink()

    def used(self) -> Counter[str]:
        """Return the bytes in use by client: of files, and of the results of batches that run."""
        found = Counter[str]()
        for record in self._all_files():
            found[record.owner] += record.bytes
        for batch in self._all_batches():
            found[batch.asked.owner] += self.results_size(batch.asked.id)
        return found

    def without_room(self, owners: Iterable[str], size: int = 1) -> set[str]:
        """Return those of ``owners`` for whose contents ``size`` more bytes find no room."""
        used = self.used()
        if used.total() + size > self._most_bytes:
            return {*owners}
        # Without keys all clients are one owner, who may use all.
        return {each for each in owners if each and used[each] + size > int(self._most_bytes * SHARE_OF_ONE)}

    # ---- batches -------------------------------------------------------------------------------------------------

    def add_batch(
        self, owner: str, input_file_id: str, endpoint: str, window: tuple[str, float],
        metadata: Mapping[str, str] | None,
    ) -> Batch:  # fmt: skip
        """Keep a batch to run. ``window`` is its completion window as the client wrote it, and in seconds."""
        if sum(not each.has_ended for each in self.batches(owner)) >= MOST_OPEN:
            raise Conflict(f"this client has {MOST_OPEN} batches that have not ended, which is the limit; wait for one")
        now = self.clock()
        asked = AskedBatch(
            id=f"batch_{secrets.token_hex(16)}", owner=owner, input_file_id=input_file_id, endpoint=endpoint,
            completion_window=window[0], created_at=int(now), expires_at=int(now + window[1]), metadata=metadata,
        )  # fmt: skip
        directory = self._batches / asked.id
        directory.mkdir(mode=0o700)
        write_whole(directory / "asked.json", msgspec.json.encode(asked))
        return Batch(asked, BatchState(), is_cancelled=False)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a client's batch; raise :class:`~tercet.protocol.UnknownPath` if it has none of that id."""
        found = self._batch(batch_id) if _ID.fullmatch(batch_id) else None
        if found is None or found.asked.owner != owner:
            raise UnknownPath(
                f"batch_id: there is no batch {batch_id:.80}; GET /v1/batches lists your batches", "batch_id"
            )
        return found

    def _batch(self, batch_id: str) -> Batch | None:
        directory = self._batches / batch_id
        if (asked := _read(directory / "asked.json", AskedBatch)) is None:
            return None
        state = _read(directory / "state.json", BatchState) or BatchState()
        return Batch(asked, state, (directory / "cancel").exists())

    def _all_batches(self) -> Iterator[Batch]:
        for path in self._batches.glob("batch_*"):
            if (found := self._batch(path.name)) is not None:
                yield found

    def batches(self, owner: str) -> list[Batch]:
        """Return a client's batches, newest first."""
        found = [each for each in self._all_batches() if each.asked.owner == owner]
        return sorted(found, key=lambda each: (each.asked.created_at, each.asked.id), reverse=True)

    def open_batches(self) -> list[Batch]:
        """Return all clients' batches that have not ended, oldest first."""
        found = [each for each in self._all_batches() if not each.has_ended]
        return sorted(found, key=lambda each: (each.asked.created_at, each.asked.id))

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Ask for the end of a batch. Raise :class:`~tercet.protocol.Conflict` if it has ended."""
        batch = self.batch(owner, batch_id)
        if batch.has_ended:
            raise Conflict(f"batch_id: the batch has ended: it is {batch.state.status}", "batch_id")
        (self._batches / batch_id / "cancel").touch()
        return self.batch(owner, batch_id)

    # ---- for the process that runs batches -----------------------------------------------------------------------

    def write_state(self, batch_id: str, state: BatchState) -> None:
        write_whole(self._batches / batch_id / "state.json", msgspec.json.encode(state))

    def results_path(self, batch_id: str) -> Path:
        return self._batches / batch_id / "results"

    def results_size(self, batch_id: str) -> int:
        try:
            return self.results_path(batch_id).stat().st_size
        except FileNotFoundError:
            return 0

    def sweep(self) -> None:
        """Delete files and ended batches older than :data:`KEPT_SECONDS`, and contents whose write was cut off."""
        now = self.clock()
        read = {each.asked.input_file_id for each in self._all_batches() if not each.has_ended}
        for record in [*self._all_files()]:
            if record.expires_at <= now and record.id not in read:
                self._remove(record.id)
        for path in self._files.glob("file-*"):
            with suppress(FileNotFoundError):
                alone = not path.suffix and not path.with_suffix(".json").exists()
                if alone and path.stat().st_mtime < now - KEPT_SECONDS:
                    path.unlink()
        for batch in [*self._all_batches()]:
            if batch.has_ended and batch.asked.created_at < now - KEPT_SECONDS:
                shutil.rmtree(self._batches / batch.asked.id, ignore_errors=True)


def page_of(items: Sequence[T], name: Callable[[T], str], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Return at most ``limit`` items behind the one called ``after``, and whether there are more.

    Raise :class:`~tercet.protocol.BadRequest` if no item is called that.
    """
    names = [name(each) for each in items]
    if after is not None and after not in names:
        raise BadRequest(f"after: {after:.80} is not in this list", "after")
    begin = 0 if after is None else names.index(after) + 1
    return list(items[begin : begin + limit]), begin + limit < len(items)


def _read(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file; None if the file is gone, or damaged, which is logged."""
    try:
        return msgspec.json.decode(read_whole(path), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UNREADABLE as error:
        logger.warning("%s is damaged, so what it describes is left out: %s; remove it", path, error)
        return None
