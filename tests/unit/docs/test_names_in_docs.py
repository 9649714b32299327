"""What documents and docstrings name exists, and their tables are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.reference.built import NAMES, page

from tests.sources import PACKAGES

from .pages import WRITTEN_BY_HAND

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
# Of these folders' files a document says the path, within the repository or within the package.
BASES = (ROOT, ROOT / "src/tercet", *(package.parent for package in PACKAGES.values()))
FOLDERS = {folder.name for base in BASES for folder in base.iterdir() if folder.is_dir()}
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`")
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")


def missing_paths(text: str) -> list[str]:
    """The paths of Python files that a text names and that do not exist."""
    named = {path for path in PATH.findall(text) if path.partition("/")[0] in FOLDERS}
    return sorted(path for path in named if not any((base / path).is_file() for base in BASES))


def cut_tables(text: str) -> list[int]:
    """The lines at which rows stand that follow no head."""
    lines = [*re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), text, flags=re.S).splitlines(), ""]
    begins = [
        at for at, line in enumerate(lines) if line.startswith("|") and not (at and lines[at - 1].startswith("|"))
    ]
    return [at + 1 for at in begins if not re.match(r"\|[\s|:-]+$", lines[at + 1])]


def unknown_flags(source: str) -> list[str]:
    """The flags that a script's docstring shows in its own command, and that its parser does not have."""
    docstring = source.split('"""')[1]
    own = [line for line in docstring.splitlines() if re.search(r"python (-m )?benchmarks[./]", line)]
    known = set(FLAG.findall(source.replace(docstring, "")))
    return sorted({flag for line in own for flag in FLAG.findall(line)} - known)


@pytest.mark.parametrize("file", [*WRITTEN_BY_HAND, *NAMES], ids=lambda file: Path(file).name)
def test_documents_name_files_that_exist_and_cut_no_table(file: Path | str) -> None:
    text = page(file) if isinstance(file, str) else file.read_text()
    assert missing_paths(text) == []
    assert cut_tables(text) == []


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_docstrings_of_benchmarks_name_their_flags(file: Path) -> None:
    assert unknown_flags(file.read_text()) == []


def test_faults_are_found() -> None:
    assert missing_paths("`router/not_there.py` and `router/serve/moves.py`") == ["router/not_there.py"]
    assert cut_tables("| a |\n| --- |\n| 1 |\n\n| 2 |\n") == [5]
    assert unknown_flags('"""Do.\n\n    python benchmarks/x.py [--json FILE] [--n N]\n"""\nadd("--n")\n') == ["--json"]
