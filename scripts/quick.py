"""`make quick`: style, and the fast tests of the rooms that differ from the last commit, or from main on a branch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# They look at all files, and take a second together.
ALWAYS = ("tests/unit/test_layers.py", "tests/unit/test_hygiene.py", "tests/unit/test_house.py")


def main() -> int:
    """Run ruff, then pytest; returns the first exit code that is not 0."""
    selected = selected_tests(changed())
    print(f"quick: {' '.join(selected)}", flush=True)
    for command in (
        ("ruff", "check", "--quiet"),
        ("ruff", "format", "--check", "--quiet"),
        ("pytest", "-q", "--hypothesis-profile", "quick", "-m", "not processes and not slow", *selected),
    ):
        code = subprocess.run((sys.executable, "-m", *command), cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


def changed() -> set[str]:
    """Paths that differ from where this branch left main, with what is not committed or not tracked."""
    base = _git("merge-base", "HEAD", "main") or ["HEAD"]
    return {*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")}


def selected_tests(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files and folders of these paths: a test is its own, a module has those of its room."""
    found: set[str] = set(ALWAYS)
    for path in map(PurePosixPath, paths):
        match path.parts:
            case ("tests", "unit", _, *_) if path.name.startswith("test_") and path.suffix == ".py":
                found.add(str(path))
            case ("src", "tercet", room, *inner):
                found.add(_closest(f"tests/unit/{room}", [part for part in inner if not part.endswith(".py")], root))
            case _:
                continue
    existing = {each for each in found if (root / each).exists()}
    return sorted(each for each in existing if not any(str(up) in existing for up in PurePosixPath(each).parents))


def _closest(tests: str, inner: Iterable[str], root: Path) -> str:
    """The folder of a room's tests, or the one inside of it that is named like the module's own folder."""
    for part in inner:
        if not (root / tests / part).exists():
            break
        tests = f"{tests}/{part}"
    return tests


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(("git", *arguments), cwd=ROOT, check=False, capture_output=True, text=True)
    return ran.stdout.split() if ran.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
