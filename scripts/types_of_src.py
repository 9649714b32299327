"""The type check of src and packages for `make check`: pyright, unless it has already passed for the same files.

build/types.txt has a hash of the files for which it passed: those under src, packages and typings, the settings of
pyright and the pinned packages. `make lint` and `make test` always check all types.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / "build" / "types.txt"
FOLDERS = ("src", *sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("packages/*/src")))
SETTINGS = ("pyproject.toml", "requirements/locked.txt", "requirements/torch.txt")


def main() -> int:
    """Check the types if files changed. Return pyright's exit code."""
    seen = hash_of(sources(ROOT), ROOT)
    if PASSED.exists() and PASSED.read_text() == seen:
        print("types: passed for the same files before")
        return 0
    code = subprocess.run((sys.executable, "-m", "pyright", *FOLDERS), cwd=ROOT, check=False).returncode
    if code == 0 and hash_of(sources(ROOT), ROOT) == seen:
        PASSED.parent.mkdir(exist_ok=True)
        PASSED.write_text(seen)
    return code


def sources(root: Path) -> list[Path]:
    """Return the files that determine the result of pyright for src and packages."""
    every = (path for folder in (*FOLDERS, "typings") for path in (root / folder).rglob("*.py*"))
    found = [path for path in every if path.suffix != ".pyc"]
    return sorted([*found, *(root / name for name in SETTINGS)])


def hash_of(paths: Iterable[Path], root: Path) -> str:
    """Return one hash of the names and contents of files."""
    all_of_them = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        all_of_them.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return all_of_them.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
