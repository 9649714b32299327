"""Files that are read whole: what is no regular file is an error, and nothing stays open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tercet.aio.files import read_whole, write_whole


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "too long"])
def test_what_is_refused_leaves_nothing_open(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"123456")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"regular|bytes"):
        read_whole(path, most=5)
    assert os.listdir("/proc/self/fd") == before


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"content", lasting=True)
    assert read_whole(tmp_path / "file") == b"content"
    assert os.listdir(tmp_path) == ["file"]
