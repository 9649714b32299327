"""Directories that are built once, by one process, and are either whole or not there.

A directory is built in a sibling with a temporary name and renamed when every byte is on disk. Builders hold a file
lock, so whatever else has a temporary name was left by a process that died. A manifest inside the directory names
its files, their sizes and what they were made from; a directory that does not agree with it is built again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

MANIFEST = "tercet.json"

Report = Callable[[str], None]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a finished directory holds: ``source`` says what it was made from, ``files`` are sizes in bytes by name."""

    source: str
    files: dict[str, int]


def is_complete(directory: Path, source: str) -> bool:
    """Whether ``directory`` was finished, was made from ``source``, and still has all of its files."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    return manifest.source == source and _sizes(directory) == manifest.files


def cached_directory(final: Path, source: str, build: Callable[[Path], None], report: Report) -> Path:
    """Return ``final``, first having ``build`` fill it when it is not complete.

    ``build`` gets an empty directory and writes plain files into it. Waits while another process builds. Raises what
    ``build`` raises, and :class:`OSError` when the cache cannot be written; nothing is left behind then.
    """
    if is_complete(final, source):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(f".{final.name}.lock"), report):
        if not is_complete(final, source):
            _build(final, source, build)
    return final


def _build(final: Path, source: str, build: Callable[[Path], None]) -> None:
    """Build and publish; the caller holds the lock."""
    for leftover in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    partial.mkdir()
    try:
        build(partial)
        manifest = Manifest(source, _sizes(partial))
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _flush(partial)
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _fsync(final.parent)


@contextmanager
def _locked(path: Path, report: Report) -> Generator[None]:
    """Hold the lock of ``path``; the kernel gives it back when the process dies. The file itself stays."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is at it, waiting for it to finish")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sizes(directory: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in sorted(directory.iterdir()) if entry.name != MANIFEST}


def _flush(directory: Path) -> None:
    """Force every file of ``directory``, and its entries, to disk."""
    for entry in directory.iterdir():
        _fsync(entry)
    _fsync(directory)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
