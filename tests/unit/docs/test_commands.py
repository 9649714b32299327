"""Commands in the manual are commands: their flags and values are read by the real command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tercet.cli.app import app

from .pages import ROOT, WRITTEN_BY_HAND, Block, blocks, place

# The base of what typer says about the command line; it has no public name.
COMMAND_LINE_ERROR: Any = typer.BadParameter.__mro__[2]
COMMAND_LINE: Any = typer.main.get_command(app)
PUNCTUATION = "|&;<>()\n"
# Flags of benchmarks and targets of make are looked up where they are declared.
BENCHMARK = re.compile(r"(?<!vllm/)benchmarks/(\w+\.py)((?: |\\\n)[^`|;#\n]*(?:\\\n[^`|;#\n]*)*)")


def command_lines(code: str) -> Iterator[list[str]]:
    """What follows ``tercet`` in each command of a shell's text, without what goes on to vLLM."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", code.replace("\\\n", " ")).replace("%i", "8001")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words = list(lexer)
    for at, word in enumerate(words):
        before = words[at - 1] if at else "\n"
        if word.rpartition("/")[2].removeprefix("ExecStart=") != "tercet":
            continue
        if is_stop(before) or before[0].isdigit() or "=" in before:  # a command begins here, or after `taskset -c 0`
            rest = words[at + 1 :]
            ends = [index for index, each in enumerate(rest) if is_stop(each) or each == "--"]
            yield rest[: min(ends, default=len(rest))]


def is_stop(word: str) -> bool:
    return bool(word) and set(word) <= set(PUNCTUATION)


def of_command(words: list[str]) -> tuple[Any, str, list[str]]:
    """The command that words name, its path, and its arguments."""
    command, path, left = COMMAND_LINE, "tercet", list(words)
    while left and left[0] in getattr(command, "commands", {}):
        path = f"{path} {left[0]}"
        command = command.commands[left.pop(0)]
    return command, path, left


@pytest.mark.parametrize("block", blocks("bash", "", "ini", "dockerfile"), ids=place)
def test_commands_are_read_by_the_command_line(block: Block) -> None:
    if "─" in block.code:
        return  # a drawing
    for words in command_lines(block.code):
        command, path, arguments = of_command(words)
        try:
            command.make_context(path, arguments)
        except typer.Exit:
            pass
        except COMMAND_LINE_ERROR as error:
            pytest.fail(f"{block.place}: tercet {' '.join(words)}: {error}")


def test_a_flag_that_there_is_not_would_be_found() -> None:
    ((*words,),) = command_lines("# a comment\ncd x && TERCET_URL=y tercet up --nonsense \\\n  1 | head")
    assert words == ["up", "--nonsense", "1"]
    with pytest.raises(pytest.fail.Exception, match="nonsense"):
        test_commands_are_read_by_the_command_line(Block("page:1", "bash", "tercet up --nonsense 1"))


def inline_commands() -> Iterator[tuple[str, str]]:
    for page in WRITTEN_BY_HAND:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for found in re.findall(r"`(tercet [^`]+)`", text):
            yield page.relative_to(ROOT).as_posix(), " ".join(found.split())


@pytest.mark.parametrize(("page", "line"), sorted(set(inline_commands())))
def test_flags_in_sentences_exist(page: str, line: str) -> None:
    words = line.partition(" -- ")[0].replace("[", "").replace("]", "").split()[1:]
    command, path, _ = of_command(words)
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    named = {word.partition("=")[0].rstrip(".,:") for word in words if word.startswith("--") and word != "--"}
    assert named <= known | {"--help"}, f"{page}: {path} has no {', '.join(sorted(named - known))}"


def test_benchmarks_have_the_flags_that_pages_give_them() -> None:
    seen = 0
    for page in WRITTEN_BY_HAND:
        for name, rest in BENCHMARK.findall(page.read_text(encoding="utf-8")):
            source = (ROOT / "benchmarks" / name).read_text(encoding="utf-8")
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest):
                seen += 1
                assert f'"{flag}"' in source, f"{page.name}: benchmarks/{name} has no {flag}"
    assert seen > 10


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in WRITTEN_BY_HAND:
        text = page.read_text(encoding="utf-8")
        named = {*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)}
        assert named <= targets, f"{page.name}: {named - targets}"
