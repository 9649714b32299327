"""Plain technical English: a word list for help texts and pages, room by room; a room that is clean stays clean.

Each rule has its remedy.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.sources import PACKAGES, PRODUCT

from .pages import ROOT, WRITTEN_BY_HAND
from .test_commands import COMMAND_LINE

# What is found, and what to write instead.
RULES = (
    (r"\b(nobody|whoever|whomever|somebody)\b", "name the subject: a client, a process, no engine"),
    (r"\banew\b", "again; restart, reload, recompute"),
    (r"\bbeside\b", "next to, in addition to, in the background"),
    (r"(?<!\bthere )\b(?:is|are|was) no (?!longer\b|more\b)\w+", "is not a, there is no, has no"),
    (r"\bso (?:many|much|long)\b(?! (?:that|as)\b)", "say the number, the time or the limit"),
    (r"\bof (?:its|their|our|your) own\b", "its own"),
    (r"\bof (?:ours|theirs)\b", "name the owner"),
    (r"\bwhat is \w+ is \w+", "name the thing"),
    (r"\bthat there (?:is|are)(?: not)?\b", "that exists, that does not exist"),
    (r"\bis told of\b", "is notified of, receives"),
)
# A help text begins with a noun or a verb.
WRONG_BEGINNING = re.compile(
    r"(?:Of|Whose|So|None|Without|For which|Until|From|To|After|Beside|Its|Their|Who|How|What|Where|As)\b"
)
# In pages: one name for one thing, and a subject that a reader can find.
PAGE_RULES = (
    (r"\bfront[ -]routers?\b", "router"),
    (r"\b(anybody|everybody)\b", "name the subject: every client, every process"),
)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(path.relative_to(ROOT).as_posix() for path in WRITTEN_BY_HAND),
)
# Packages whose docstrings, comments, help texts, errors and log lines are clean.
ROOMS = (
    *(top.relative_to(ROOT).as_posix() for top in (PRODUCT, *PACKAGES.values())), "benchmarks", "scripts",
)  # fmt: skip
# Texts of the router's page, and the comments of what users deploy and run first.
SHOWN = (
    ROOT / "src/tercet/router/page/static/index.html",
    *sorted((ROOT / "src/tercet/router/page/static").rglob("*.js")),
    *(path for path in sorted((ROOT / "deploy").rglob("*")) if path.is_file()),
    *sorted((ROOT / "examples").rglob("*.py")),
    ROOT / "Makefile",
)
# A comment or a string of JavaScript.
JS_TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|"[^"\n]*"|`[^`]*`""", re.DOTALL)
# Five times as fast as the tokenizer of the standard library.
STRING_OR_COMMENT = re.compile(
    r'''(?:\b[rbfuRBFU]{1,2})?(?:"""(?:[^\\"]|\\.|"(?!""))*"""|"(?:[^\\"\n]|\\.)*"|'(?:[^\\'\n]|\\.)*')|\#[^\n]*''',
    re.DOTALL,
)
# It quotes a story.
EXEMPT = {"src/tercet/cli/demo.py"}


def found_in(text: str, rules: tuple[tuple[str, str], ...] = RULES) -> list[str]:
    """What breaks a rule, with the remedy."""
    plain = re.sub(r"```.*?```|``[^`]*``|`[^`]*`|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL)
    plain = " ".join(plain.split())
    return [f"{match[0]!r}: {remedy}" for rule, remedy in rules for match in re.finditer(rule, plain, re.IGNORECASE)]


def prose_of(name: str) -> str:
    """The text of a page; of a module its comments and its strings with spaces: others are names and keys."""
    text = (ROOT / name).read_text(encoding="utf-8")
    match name.rpartition(".")[2]:
        case "py":
            return "\n".join(prose_in(STRING_OR_COMMENT.findall(text)))
        case "js":
            return "\n".join(
                re.sub(r"\$\{[^}]*\}|[`\"]|//", " ", found) for found in JS_TEXT.findall(text) if " " in found
            )
        case "html":
            attributes = re.findall(r"(?:aria-label|title|alt|placeholder)=\"([^\"]*)\"", text)
            return "\n".join([*re.sub(r"<[^>]*>", "\n", text).splitlines(), *attributes])
        case _:
            return text


def prose_in(tokens: Iterable[str]) -> Iterator[str]:
    return (token.removeprefix("#") for token in tokens if token.startswith("#") or " " in token)


def commands(command: Any = COMMAND_LINE, path: str = "tercet") -> Iterator[tuple[str, Any]]:
    """Every command of the command line by its path, groups included."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), list(commands()), ids=lambda each: each if isinstance(each, str) else "")
def test_help_texts(path: str, command: Any) -> None:
    assert found_in(command.help or "") == []
    for each in command.params:
        text = getattr(each, "help", None) or ""
        assert found_in(text) == [], f"{path} {each.opts}: {text}"
        assert not WRONG_BEGINNING.match(text), f"{path} {each.opts}: begin with a noun or a verb: {text}"


def modules_of_rooms() -> list[str]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [name for name in (path.relative_to(ROOT).as_posix() for path in found) if name not in EXEMPT]


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_one_name_for_one_thing(name: str) -> None:
    assert found_in((ROOT / name).read_text(encoding="utf-8"), PAGE_RULES) == []


@pytest.mark.parametrize("name", sorted({path.relative_to(ROOT).as_posix() for path in SHOWN}))
def test_texts_that_users_see(name: str) -> None:
    assert found_in(prose_of(name), RULES + PAGE_RULES) == []


def test_texts_of_the_page_are_read() -> None:
    static = "src/tercet/router/page/static"
    assert "Skip to the fleet" in prose_of(f"{static}/index.html")
    assert "Output tokens" in prose_of(f"{static}/js/charts.js")
    assert "The state of the fleet, built from frames" in prose_of(f"{static}/js/state.js")
    assert "it gets no new requests" in prose_of(f"{static}/js/actions.js")


@pytest.mark.parametrize("name", sorted({*PAGES, *modules_of_rooms()}))
def test_pages_and_modules(name: str) -> None:
    assert found_in(prose_of(name)) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its tokenizer takes f-strings apart")
def test_prose_is_what_the_tokenizer_finds() -> None:
    for name in modules_of_rooms():
        text = (ROOT / name).read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
        assert prose_of(name) == "\n".join(prose_in(found)), name


def test_clean_modules_exist() -> None:
    assert all((ROOT / name).is_file() for name in EXEMPT)
    assert len(modules_of_rooms()) > 20


@pytest.mark.parametrize(
    "text",
    ["Nobody reads it.", "It is started anew.", "A process beside it.", "This is no program.", "So many tokens.",
     "A name of its own.", "Code of ours.", "What is asked is answered.", "an option that there is not"],
)  # fmt: skip
def test_each_rule_finds_what_it_is_about(text: str) -> None:
    assert found_in(text)


@pytest.mark.parametrize(
    "text", ["It is no longer used.", "So long as it runs.", "`nobody` is a user.", "There is no port."]
)
def test_plain_sentences_pass(text: str) -> None:
    assert found_in(text) == []
