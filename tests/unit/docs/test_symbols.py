"""Every path, command, flag and symbol that the manual names exists; the reading path is as long as it says."""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, cast

import pytest

from tests.sources import PACKAGES, PRODUCT, modules

from .pages import DOCS, ROOT, WRITTEN_BY_HAND
from .test_commands import COMMAND_LINE

PAGES = [ROOT / "CONTRIBUTING.md", *WRITTEN_BY_HAND]
FIGURES = sorted((DOCS / "figures").glob("*.svg"))
# Pages that name flags of other tools.
OF_OTHER_TOOLS = {"clients.md", "llm-d.md"}
# Flags of pip's pre-commit, of valgrind, and one that a decision says is gone.
OTHER_FLAGS = {"--hook-type", "--tool", "--piece"}
# Paths that are made when something runs, or are other projects'.
MADE_OR_OTHERS = re.compile(r"(build|docs/_build|docs/reference|vllm|pkg|deploy/config|tercet)(/|$)")
# Names that are not in the code: other programs', results' or an example's.
OTHERS = {
    "BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC", "ID", "MC_TCP_BIND_ADDRESS", "TimeoutStopSec", "half_life",
    "halfLife", "UCX_NET_DEVICES", "VLLM_ENABLE_RESPONSES_API_STORE", "buffer_steps", "cpuset", "cudaEventQuery",
    "enableEviction", "generated_texts", "nvidia_peermem", "p99_tpot_ms", "profile_export_raw", "sglang",
    "validation_context", "ResponsesRequest", "RAY_JOB_STOP_WAIT_TIME_S",
    # vLLM 0.33's, which the installed version does not have.
    "FIRST_REQ", "RequestError", "finalize_step", "kv_hints", "lookahead_token_ids", "restore_kv_caches",
    "unregister_kv_caches", "validation_error",
}  # fmt: skip


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def quoted(page: Path) -> set[str]:
    return {" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose(page))}


@cache
def files() -> tuple[str, ...]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return tuple(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1])


@cache
def code() -> str:
    """The text of all files but the manual's and the tests' of it."""
    left_out = ("docs/", "tests/unit/docs/")
    found = [ROOT / name for name in files() if not name.startswith(left_out) and not name.endswith((".md", ".lock"))]
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in found if path.is_file())


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", code())) | {Path(name).stem for name in files()}


@cache
def places() -> frozenset[str]:
    """Every file and folder, by each end of its path."""
    paths = {"/".join(name.split("/")[:count]) for name in files() for count in range(1, name.count("/") + 2)}
    return frozenset("/".join(path.split("/")[start:]) for path in paths for start in range(path.count("/") + 1))


def missing_paths(text: set[str]) -> list[str]:
    """The paths that begin with a folder of the repository or the package, and Python files, that do not exist."""
    path = re.compile(r"[\w.-]+(/[\w.-]+)+/?|\w+\.py")
    named = [each.rstrip("/") for each in text if path.fullmatch(each) and not MADE_OR_OTHERS.match(each)]
    folders = {name.split("/")[0] for name in files() if "/" in name}
    folders |= {place.name for top in (PRODUCT, *PACKAGES.values()) for place in top.rglob("*") if place.is_dir()}
    ours = [each for each in named if each.endswith(".py") or each.split("/")[0] in folders]
    return sorted(each for each in ours if each not in places() and each not in ("mine.py", "policy.py"))


def missing_words(text: set[str]) -> list[str]:
    """The identifiers, dotted or not, of which a part is nowhere in the code."""
    metric = re.compile(r"tercet_\w+|TERCET_\w+")  # test_names.py has those
    named = [each for each in text if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?", each)]
    parts = {part for each in named for part in re.findall(r"[A-Za-z_]\w*", each) if not metric.fullmatch(part)}
    return sorted(part for part in parts if not {part, snake(part)} & words() and part not in OTHERS)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower()


@cache
def sources() -> dict[Path, str]:
    """The modules of the package."""
    return {path: path.read_text(encoding="utf-8") for _, path in modules()}


@cache
def classes_in(path: Path) -> dict[str, tuple[set[str], list[str]]]:
    """The names that stand in the body of each class of a module, and the classes that it derives from."""
    lines = sources()[path].splitlines()
    found: dict[str, tuple[set[str], list[str]]] = {}
    for node in ast.walk(ast.parse(sources()[path])):
        if isinstance(node, ast.ClassDef):
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            members, bases = found.setdefault(node.name, (set(), []))
            members.update(re.findall(r"(?:\bdef |\bself\.)(\w+)", text), re.findall(r"(?m)^    (\w+)\s*[:=]", text))
            bases.extend(ast.unparse(base).split("[")[0] for base in node.bases)
    return found


@cache
def members_of(name: str) -> frozenset[str] | None:
    """The names in the body of a class of the package, and of those that it derives from; None without such a class."""
    places = [path for path, text in sources().items() if re.search(rf"\bclass {name}\b", text)]
    found = [each for path in places if (each := classes_in(path).get(name))]
    inherited = [members_of(base) or frozenset() for _, bases in found for base in bases if base != name]
    return frozenset().union(*(members for members, _ in found), *inherited) if found else None


def missing_members(text: set[str]) -> list[str]:
    """``Class.member`` of a class of the package that has no such member."""
    pairs = [match for each in text if (match := re.fullmatch(r"([A-Z]\w+)\.([a-z_]\w*)", each))]
    return sorted(match[0] for match in pairs if match[2] not in (members_of(match[1]) or {match[2]}))


def misplaced(text: str) -> list[str]:
    """Symbols behind the path of a file, as in design.md, that this file does not define."""
    found: list[str] = []
    for name, symbol in re.findall(r"`([\w/]+\.py)`\s+`(\w+(?:\.\w+)?)`", text):
        texts = [(ROOT / each).read_text(encoding="utf-8") for each in files() if f"/{each}".endswith(f"/{name}")]
        outer, _, member = symbol.partition(".")
        defined = re.compile(rf"\b(?:class|def) {outer}\b")
        if not any(defined.search(each) and re.search(rf"\b{member}\b", each) for each in texts):
            found.append(f"{name} {symbol}")
    return found


def options(command: Any = COMMAND_LINE) -> Iterator[str]:
    yield from (name for each in command.params for name in (*each.opts, *each.secondary_opts))
    for each in getattr(command, "commands", {}).values():
        yield from options(each)


@cache
def flags() -> frozenset[str]:
    """Tercet's, vLLM's server's, and those that stand in the code: scripts', benchmarks', and what goes to others."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tercet.vllm_plugin.differences import cli_args

    parser = cli_args().make_arg_parser(FlexibleArgumentParser())
    of_vllm = {name for action in parser._actions for name in action.option_strings}
    return frozenset({*options(), *of_vllm, *re.findall(r"--[a-z][a-z0-9-]+", code())})


def missing_flags(text: set[str]) -> list[str]:
    named = {flag for each in text for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", each)} - OTHER_FLAGS
    return sorted(flag for flag in named if flag not in flags() and not _is_beginning(flag))


def _is_beginning(flag: str) -> bool:
    return flag.endswith("-") and any(each.startswith(flag) for each in flags())


def missing_commands(text: set[str]) -> list[str]:
    return sorted(each for each in text if each.startswith("tercet ") and not _is_command(each.split()[1:]))


def _is_command(names: list[str]) -> bool:
    command = COMMAND_LINE
    for name in names:
        if not getattr(command, "commands", {}) or name.startswith("-"):
            return True
        command = command.commands.get(name)
        if command is None:
            return name in ("...", "…") or name.isupper()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    text = quoted(page)
    assert missing_paths(text) == []
    assert missing_words(text) == []
    assert missing_members(text) == []
    assert misplaced(prose(page)) == []
    assert missing_commands(text) == []
    if page.name not in OF_OTHER_TOOLS:
        assert missing_flags(text) == []


# Messages that pages quote: this part of each is what the code prints.
QUOTED = [
    ("operations.md", "must be greater than"),
    ("scheduling.md", "there is no such field here"),
    ("tutorial.md", "has no function"),
    ("howto/gpu.md", "auto continues without"),
    ("howto/gpu.md", "the device no longer works for this process"),
    ("howto/gpu.md", "a worker's KV cannot be mapped"),
    ("howto/gpu.md", "KV of this sender is read over"),
    *(("troubleshooting.md", message) for message in (
        "cannot listen at", "has no function", "is a flag of Tercet; give it before --",
        "is not supported", "is not as Tercet needs it", "no engine that may be picked answers",
        "this engine's KV cannot be shared with the process that moves it (CUDA IPC)", "there is no program",
        "every engine of this fleet is drained or stops", "this client was slow",
        "no engine serves the model that this router announced to its clients",
    )),
]  # fmt: skip


@cache
def texts() -> str:
    """Every string of the package that its code can print, those of f-strings by parts."""
    # Compiled modules are at hand, and are read in a tenth of the time that it takes to parse their sources.
    modules = (SourceFileLoader("any", str(path)).get_code("any") for path in sources())
    return "\n".join(text for module in modules if module is not None for text in strings_of(module))


def strings_of(code: CodeType) -> Iterator[str]:
    for each in code.co_consts:
        if isinstance(each, str):
            yield each
        elif isinstance(each, tuple | frozenset):
            yield from (text for text in cast("Iterable[object]", each) if isinstance(text, str))
        elif isinstance(each, CodeType):
            yield from strings_of(each)


@pytest.mark.parametrize(("page", "message"), QUOTED)
def test_quoted_messages_are_what_the_code_prints(page: str, message: str) -> None:
    assert message in " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert message in texts(), f"{page} quotes a message that the code does not print: {message}"


@pytest.mark.slow
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_figures_name_what_exists_and_read_in_light_and_dark(figure: Path) -> None:
    text = figure.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    assert tree.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in text
    named = {each.strip() for found in re.findall(r'class="code"[^>]*>([^<]+)<', text) for each in found.split(",")}
    symbols = {each for each in named if re.fullmatch(r"[\w.]+", each)}
    assert missing_words(symbols) == []
    assert missing_members(symbols) == []


def lines_of_code(path: Path) -> int:
    """The lines of a file without empty ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def test_the_reading_path_is_ten_files_of_the_length_that_it_says() -> None:
    page = (DOCS / "read-me-in-an-hour.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, 11)]
    lengths = [len((ROOT / "src/tercet" / name).read_text(encoding="utf-8").splitlines()) for _, name, _ in rows]
    for (_, name, said), length in zip(rows, lengths, strict=True):
        assert abs(int(said) - length) <= length / 20, f"{name} has {length} lines"
    said = re.search(r"about ([\d,]+) lines, of which ([\d,]+) are code", " ".join(page.split()))
    assert said
    lines, of_code = (int(number.replace(",", "")) for number in said.groups())
    code = sum(lines_of_code(PRODUCT / name) for _, name, _ in rows)
    assert abs(lines - sum(lengths)) <= sum(lengths) / 20, f"they have {sum(lengths)} lines"
    assert abs(of_code - code) <= code / 20, f"they have {code} lines of code"


def test_ten_questions_are_answered_by_one_file_each() -> None:
    page = (DOCS / "read-me-in-an-hour.md").read_text(encoding="utf-8")
    section = page.split("## A stranger's ten questions")[1].split("\n## ")[0]
    answers = re.findall(r"^\| [^|`]+\? \| `([\w/]+\.py)` `(\w+(?:\.\w+)?)` \|$", section, re.MULTILINE)
    assert len({name for name, _ in answers}) == 10 == section.count("? |")
    assert all((PRODUCT / name).is_file() for name, _ in answers)
    assert misplaced(section) == []
    assert missing_members({symbol for _, symbol in answers}) == []


def test_decisions_are_listed_in_the_order_of_their_numbers() -> None:
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (DOCS / "adr" / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in (DOCS / "adr").glob("0*.md"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "text"),
    [
        (missing_paths, "router/admission.py"),
        (missing_paths, "nowhere_at_all.py"),
        (missing_paths, "tests/unit/no_such_folder"),
        (missing_words, "no_such_" + "word"),
        (missing_members, "LeaseTimers.nothing"),
        pytest.param(missing_flags, "--no-such-" + "flag", marks=pytest.mark.vllm),
        (missing_commands, "tercet nothing"),
        (missing_commands, "tercet engines nothing"),
    ],
)
def test_what_does_not_exist_is_found(find: Any, text: str) -> None:
    assert find({text}) == [text]


def test_a_symbol_in_another_file_is_found() -> None:
    # This file imports the class.
    assert misplaced("`fleet/admission.py` `Gate`, `fleet/engine_fleet.py` `Picking`") == [
        "fleet/engine_fleet.py Picking"
    ]
    assert misplaced("`fleet/admission.py` `Gate` and `router/serve/moves.py` `Gate`") == ["router/serve/moves.py Gate"]
