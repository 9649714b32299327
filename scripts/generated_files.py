"""The files that a script generates: write those that differ, or check that none differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def stale(folder: Path, found: Mapping[str, str], pattern: str = "*") -> list[str]:
    """Return the names of files that are out of date, missing, or no longer generated."""
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob(pattern)}
    return sorted(name for name in found.keys() | there.keys() if found.get(name) != there.get(name))


def write_or_check(
    command: str, about: str | None, folder: Path, shown: str, found: Mapping[str, str], pattern: str = "*"
) -> int:
    """Write the generated files ``found`` to ``folder``, or check them with ``--check``, for the command ``command``.

    Return the exit code: 1 if ``--check`` found a file that is out of date.
    """
    parser = argparse.ArgumentParser(prog=command, description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    check: bool = parser.parse_args().check
    wrong = stale(folder, found, pattern)
    if check:
        if wrong:
            print(f"{shown}: {', '.join(wrong)} out of date; run {command}", file=sys.stderr)
        return bool(wrong)
    folder.mkdir(exist_ok=True)
    for name in wrong:
        if name in found:
            (folder / name).write_text(found[name], encoding="utf-8")
        else:
            (folder / name).unlink()
        print(f"{shown}/{name}")
    return 0
