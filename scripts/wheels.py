"""Build what images and registries need, into dist: each package's wheel, the images' pins, the packaged chart.

    python -m scripts.wheels [FOLDER]

Wheels are built from copies of the files that git has: nothing of an earlier build gets into them.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT, *sorted((ROOT / "packages").glob("tercet-*")))
PINS = ("cpu.txt", "gateway.txt")
CHART = ROOT / "deploy" / "kubernetes" / "tercet"
# Folders of the repository that are in no wheel of its root.
_OTHERS = ("packages/", "tests/", "docs/")


def copy_of(source: Path, into: Path) -> Path:
    """Copy the files of a package that git has, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", "."], cwd=source, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (source == ROOT and name.startswith(_OTHERS)) or not (source / name).exists():
            continue
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    return into


def build(folder: Path) -> None:
    """Build all wheels into an empty folder, and put the pins there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "requirements").mkdir(parents=True)
    for name in PINS:
        shutil.copy(ROOT / "requirements" / name, folder / "requirements")
    with tempfile.TemporaryDirectory(prefix="tercet-wheels-") as copies:
        made = [str(copy_of(source, Path(copies) / f"{source.name}-copy")) for source in SOURCES]
        command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-build-isolation", "--wheel-dir", str(folder), *made], check=True)


def package_chart(folder: Path) -> str:
    """Package the chart by Helm's own code; return the file, or empty where that is not installed."""
    try:
        helm: Any = importlib.import_module("helm_python")
    except ImportError:
        return ""
    return str(helm.package(str(CHART), destination=str(folder)))


def main(arguments: Sequence[str]) -> None:
    """Build into the folder of the command line, by default dist, and list it."""
    folder = Path(arguments[0] if arguments else ROOT / "dist")
    build(folder)
    if not package_chart(folder):
        print(f"the chart is not packaged: helm package {CHART.relative_to(ROOT)} --destination {folder}")
    print(*sorted(str(each) for each in folder.rglob("*") if each.is_file()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
