"""Blocks on disk: a file for each, written under another name and renamed, with checksums; the least used go first.

A file is a head, the header with the block's contents, and the KV: of each rank, plane by plane::

    | magic, length and checksum of the header | header: contents, checksum of the KV | KV ... |

The names of files come from contents, and folders from what KV is exchanged by, so files of other weights are not
found; they are deleted first when there is no room. Nothing is believed that a file says before its checksum fits.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE
from tercet.store.contents import BlockContent

logger = logging.getLogger(__name__)
File = TypeVar("File", bound=Hashable)
HEAD = struct.Struct("<8sI16s")
MAGIC = b"tercetk1"
CHECKSUM_BYTES = 16
LONGEST_HEADER = 1024 * 1024
PART = ".part"
LOCK = "tercet.lock"
PASSING = errno.EMFILE, errno.ENFILE, errno.ENOMEM
"""Errors that say nothing about a file, which may be read another time."""
# Other files below the root are not ours, and stay.
FOLDER, FILE = re.compile(r"tercet-[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}(\.part)?")


class FileHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a block's file: the block's contents, and the size and checksum of its KV."""

    content: BlockContent
    nbytes: int
    checksum: bytes


class DiskIndex(Generic[File]):
    """Which files there are, the least recently used first, and their bytes: at most ``limit``. Without I/O."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._sizes: OrderedDict[File, int] = OrderedDict()

    def __contains__(self, file: File) -> bool:
        return file in self._sizes

    def __iter__(self) -> Iterator[File]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def surplus(self, size: int) -> list[File] | None:
        """Return the files that must go so that ``size`` more bytes fit; None if they can never fit."""
        if size > self.limit:
            return None
        gone, nbytes = list[File](), self.nbytes
        for file, there in self._sizes.items():
            if nbytes + size <= self.limit:
                break
            nbytes -= there
            gone.append(file)
        return gone

    def make_room(self, size: int) -> list[File] | None:
        """Forget the :meth:`surplus`, and return it."""
        gone = self.surplus(size)
        for file in gone or ():
            self.remove(file)
        return gone

    def add(self, file: File, size: int) -> None:
        """Add a file as the most recently used one; the :meth:`surplus` must have gone."""
        # It may be known already: its old size must not stay in the sum.
        self.remove(file)
        self._sizes[file] = size
        self.nbytes += size

    def remove(self, file: File) -> None:
        self.nbytes -= self._sizes.pop(file, 0)

    def touch(self, file: File) -> None:
        """Note a use of a file, if it exists."""
        if file in self._sizes:
            self._sizes.move_to_end(file)


class DiskFolder:
    """The files below ``root``: reads and writes, which block and run in threads. ``kind`` is this store's folder.

    ``block_bytes`` is the size of a block's KV. Raises :class:`~tercet.protocol.BadRequest` if the folder cannot be
    used, or is another store's.
    """

    def __init__(self, root: Path, kind: str, block_bytes: int) -> None:
        self.root, self.kind = root, kind
        self._block_bytes = block_bytes
        try:
            (root / kind).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadRequest(f"disk: {root} is another store's; give each its own folder", "disk") from error
        except OSError as error:
            raise BadRequest(f"disk: {root} cannot be used: {error.strerror}", "disk") from error

    def file(self, name: bytes) -> str:
        """Return the path of a block's file below the root."""
        return f"{self.kind}/{name.hex()}"

    def scan(self) -> Iterator[tuple[str, int, BlockContent | None]]:
        """Yield path, size and contents of each file, the least recently used first; without contents for other kinds.

        Files that are not whole are deleted.
        """
        found = list[tuple[bool, float, str, int]]()
        for folder in filter(lambda each: FOLDER.fullmatch(each.name) and each.is_dir(), self.root.iterdir()):
            for path in filter(lambda each: FILE.fullmatch(each.name), folder.iterdir()):
                with suppress(OSError):
                    stat = path.stat()
                    name = f"{folder.name}/{path.name}"
                    found.append((folder.name == self.kind, stat.st_mtime, name, stat.st_size))
        # Other kinds sort first, as False is less than True: their files go before this kind's do.
        left = list[OSError]()
        for ours, _, name, size in sorted(found):
            try:
                content = self._content(name, size) if ours else None
            except OSError as error:
                left.append(error)
                continue
            if name.endswith(PART) or (ours and content is None):
                self.delete([name])
            else:
                yield name, size, content
        if left:
            logger.warning("disk: %d files are left out until the next start: %s", len(left), left[0].strerror)

    def _content(self, name: str, size: int) -> BlockContent | None:
        """Return the contents that a file's header says; None if the file is not whole. Raises ``OSError``."""
        try:
            with (self.root / name).open("rb", buffering=0) as file:
                header, length = _read_header(file.fileno())
        except OSError as error:
            if error.errno in PASSING:
                raise
            return None
        except (ValueError, *UNREADABLE):
            return None
        # The start reads headers only. KV is checked when it is read, as a whole disk would take minutes.
        whole = length + header.nbytes == size and header.nbytes == self._block_bytes
        content = header.content
        return content if whole and content.is_genuine and self.file(content.name) == name else None

    def size_of(self, content: BlockContent) -> int:
        return len(self._front(content, bytes(CHECKSUM_BYTES))) + self._block_bytes

    def _front(self, content: BlockContent, checksum: bytes) -> bytes:
        header = msgspec.msgpack.encode(FileHeader(content, self._block_bytes, checksum))
        return HEAD.pack(MAGIC, len(header), _checksum([memoryview(header)])) + header

    def write(self, content: BlockContent, parts: Sequence[memoryview]) -> int:
        """Write a block, whose KV is in ``parts``; return the size of its file. Raises ``OSError``, leaving no file."""
        front = self._front(content, _checksum(parts))
        path = self.root / self.file(content.name)
        part = path.with_name(path.name + PART)
        try:
            with part.open("wb", buffering=0) as file:
                for piece in (memoryview(front), *parts):
                    left = piece
                    while left:
                        left = left[os.write(file.fileno(), left) :]
            # No fsync: after a power failure a file may be short, which its checksum shows; KV can be computed again.
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return len(front) + self._block_bytes

    def read(self, content: BlockContent, parts: Sequence[memoryview]) -> bool:
        """Read a block into ``parts``; return False, and delete the file, if it is damaged. Raises ``OSError``."""
        path = self.root / self.file(content.name)
        with path.open("rb", buffering=0) as file:
            try:
                header, _ = _read_header(file.fileno())
                # Names are digests of contents: a file under another's name is as wrong as a flipped bit.
                good = header.content.name == content.name and all(_read_all(file.fileno(), part) for part in parts)
                good = good and _checksum(parts) == header.checksum
            except OSError as error:
                if error.errno in PASSING:
                    raise
                good = False  # such as a bad sector: the block is to be brought again
            except (ValueError, *UNREADABLE):
                good = False
        with suppress(OSError):  # the disk is read-only, or the file was evicted since
            if good:
                os.utime(path)  # the order of use survives a restart
            else:
                path.unlink()
        return good

    def delete(self, files: Sequence[str]) -> list[str]:
        """Delete files, and folders of other kinds that become empty; return those files that are gone."""
        gone = list[str]()
        for name in files:
            path = self.root / name
            with suppress(OSError):
                path.unlink(missing_ok=True)
                gone.append(name)
            if path.parent.name != self.kind:
                with suppress(OSError):
                    path.parent.rmdir()
        return gone

    def close(self) -> None:
        """Let another store use the folder."""
        os.close(self._lock)


def _read_header(fd: int) -> tuple[FileHeader, int]:
    """Return the header of an open file, and the offset of the KV; raise ``ValueError`` for a damaged one."""
    magic, length, checksum = HEAD.unpack(os.read(fd, HEAD.size).ljust(HEAD.size, b"\0"))
    if magic != MAGIC or length > LONGEST_HEADER:
        raise ValueError("not a block's file")
    text = bytearray(length)
    if not _read_all(fd, memoryview(text)) or _checksum([memoryview(text)]) != checksum:
        raise ValueError("the header is damaged")
    return msgspec.msgpack.decode(text, type=FileHeader), HEAD.size + length


def _read_all(fd: int, into: memoryview) -> bool:
    """Fill ``into``; return False at the end of the file."""
    while into:
        count = os.readv(fd, [into])
        if not count:
            return False
        into = into[count:]
    return True


def _checksum(parts: Sequence[memoryview]) -> bytes:
    found = blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()
