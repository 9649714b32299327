"""Reading the files that users name, and saying what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from tercet.protocol import BadRequest


def read_text(path: str, kind: str) -> str:
    """The text of a workload's file; raises :class:`~tercet.protocol.BadRequest` naming the workload and the file."""
    if not path:
        raise BadRequest(f"workload {kind}: path is missing, as in {kind},path=FILE", "path")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadRequest(f"workload {kind}: cannot read {path}: {error.strerror}", "path") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"workload {kind}: {path} is not UTF-8 text", "path") from error


def broken(kind: str, path: str, line: int, why: str) -> BadRequest:
    """The error for one line of a file."""
    return BadRequest(f"workload {kind}: {path}, line {line}: {why}", "path")
