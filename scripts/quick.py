"""`make quick`: style, and the fast tests of the packages with changes, compared with main or the last commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# Tests that check all files; together they take a second.
ALWAYS = ("tests/unit/test_layers.py", "tests/unit/test_house.py")


def main() -> int:
    """Run ruff, then pytest. Return the first exit code that is not 0."""
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
    """Return the paths that changed since this branch left main, with uncommitted and untracked ones."""
    base = _git("merge-base", "HEAD", "main") or ["HEAD"]
    return {*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")}


def selected_tests(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files and folders for these paths: a test for itself, the package's tests for a module."""
    found: set[str] = set(ALWAYS)
    for path in map(PurePosixPath, paths):
        match path.parts:
            case ("tests", "unit", _, *_) if path.name.startswith("test_") and path.suffix == ".py":
                found.add(str(path))
            case ("src", "tercet", room, *inner) | ("packages", _, "src", room, *inner) if inner:
                room = "cluster/on_ray" if room == "tercet_ray" else room.removeprefix("tercet_")
                found.add(_closest(f"tests/unit/{room}", [part for part in inner if not part.endswith(".py")], root))
            case _:
                continue
    existing = {each for each in found if (root / each).exists()}
    return sorted(each for each in existing if not any(str(up) in existing for up in PurePosixPath(each).parents))


def _closest(tests: str, inner: Iterable[str], root: Path) -> str:
    """Return the folder of a package's tests, or the folder inside it that has the name of the module's folder."""
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
