"""Commands in the manual are commands, and README and how-tos work as typed: every line of a shell exists, and flags
and values are read by the real command line.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from tercet.cli.app import app
from tercet.cli.setting_flags import flags_given
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.protocol.headers import GENERATING
from tercet.router.router_app import OPEN
from tercet.settings import RouterConfig, Settings, decode_settings
from tercet.settings.process_settings import API_KEY_VARIABLE
from tercet_gateway.gateway_settings import ModelRouterConfig, PickerConfig, SidecarConfig
from tercet_planner.planner_settings import PlannerConfig

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


PAGES = ("README.md", "docs/howto/", "docs/tutorial.md")
BLOCKS = [each for each in blocks("bash") if each.place.startswith(PAGES)]
SERVERS: dict[str, tuple[type[Settings], str]] = {
    "tercet up": (UpConfig, "engine-args"),
    "tercet router": (RouterConfig, "router-args"),
    "tercet epp": (PickerConfig, ""),
    "tercet sidecar": (SidecarConfig, ""),
    "tercet model-router": (ModelRouterConfig, ""),
    "tercet planner": (PlannerConfig, ""),
}
# What a reader has, or the page says how to get.
PROGRAMS = {
    "tercet", "make", "curl", "python", "python3", "pip", "source", "export", "echo", "sudo", "install", "openssl",
    "docker", "helm", "kubectl", "cd", "git", "cat", "systemctl", "chmod", "ray",
}  # fmt: skip
VLLM_SERVER = "vllm.entrypoints.openai.api_server"


def lines_of(code: str) -> Iterator[list[str]]:
    """The words of each command in a shell's text, variables that are set before it included."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", code.replace("\\\n", " "))
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "X", text), posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    line: list[str] = []
    for word in lexer:
        if is_stop(word):
            yield line
            line = []
        else:
            line.append(word)
    yield line


def programs_of(code: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    for line in lines_of(code):
        variables = dict(word.split("=", 1) for word in line if re.match(r"[A-Z_]+=", word))
        words = [
            word for index, word in enumerate(line) if not (re.match(r"[A-Z_]+=", word) and index < len(variables))
        ]
        if words:
            yield variables, words


# Whether vLLM has the module that a line runs is found by importing vLLM.
MARKED = [pytest.param(each, marks=pytest.mark.vllm) if VLLM_SERVER in each.code else each for each in BLOCKS]


@pytest.mark.parametrize("block", MARKED, ids=place)
def test_each_line_is_a_program_that_there_is(block: Block) -> None:
    for _, words in programs_of(block.code):
        assert words[0].rpartition("/")[2] in PROGRAMS, f"{block.place}: {' '.join(words)}"
        if words[:2] == ["python", "-m"] and words[2] != VLLM_SERVER:
            assert importlib.util.find_spec(words[2]) is not None, f"{block.place}: there is no module {words[2]}"


@pytest.mark.parametrize("block", BLOCKS, ids=place)
def test_servers_accept_their_settings(block: Block) -> None:
    for words in command_lines(block.code):
        command, path, arguments = of_command(words)
        if path in SERVERS:
            kind, rest = SERVERS[path]
            given = command.make_context(path, arguments).params
            config = given.pop("config", None)
            assert config is None or not str(config).startswith("./")
            try:
                decode_settings(kind, flags_given(kind, given, rest))
            except BadRequest as error:
                pytest.fail(f"{block.place}: {path}: {error.message}")


@pytest.mark.parametrize("block", [each for each in BLOCKS if "curl" in each.code], ids=place)
def test_calls_are_of_routes_that_there_are(block: Block) -> None:
    for _, (program, *words) in programs_of(block.code):
        if program != "curl":
            continue
        (url,) = (word for word in words if re.match(r"(https?://)?localhost[:/]|\$\w+/", word))
        path = "/" + re.sub(r"^https?://", "", url).partition("/")[2].partition("?")[0]
        assert path in GENERATING | OPEN or path.startswith(("/tercet/v1/", "/v1/models")), f"{block.place}: {path}"
        for flag, body in itertools.pairwise(words):
            if flag in ("-d", "--data") and "$" not in body:
                fields = msgspec.json.decode(body, type=dict[str, Any])
                assert path not in GENERATING or "max_tokens" in fields, f"{block.place}: an answer without a bound"


@pytest.mark.slow
def test_vllms_own_command_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tercet.vllm_plugin.differences import cli_args
    from tercet.vllm_plugin.start.start_checks import require_flags

    assert importlib.util.find_spec(VLLM_SERVER) is not None
    monkeypatch.delenv("TERCET_SECRET", raising=False)
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    seen = 0
    for block in BLOCKS:
        for variables, words in programs_of(block.code):
            if words[:3] == ["python", "-m", VLLM_SERVER]:
                args = cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])
                assert args is not None
                monkeypatch.setenv("VLLM_PLUGINS", variables["VLLM_PLUGINS"])
                require_flags(args)
                seen += 1
    assert seen


@pytest.mark.parametrize(
    "code",
    [
        "tercet router --engine 10.0.0.5",
        "tercet up --prefill -1",
        "tercet up --prefill 0 --decode 0",
        "tercet up --port x",
    ],
)
def test_what_would_be_refused_is_found(code: str) -> None:
    with pytest.raises(pytest.fail.Exception):
        test_servers_accept_their_settings(Block("page:1", "bash", code))


@pytest.mark.parametrize(
    "code",
    [
        "curl localhost:8000/v1/chat/completions -d '{}'",
        "curl localhost:8000/v2/models",
        "curl localhost:8000/v1/models -d '{'",
    ],
)
def test_a_wrong_call_is_found(code: str) -> None:
    with pytest.raises((AssertionError, msgspec.DecodeError)):
        test_calls_are_of_routes_that_there_are(Block("page:1", "bash", code))


@pytest.mark.parametrize("code", ["make setup && teret up", "python -m no_such_module", "A=1 nonsense  # make"])
def test_a_wrong_program_is_found(code: str) -> None:
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        test_each_line_is_a_program_that_there_is(Block("page:1", "bash", code))


def test_both_commands_of_the_readme_are_targets() -> None:
    assert {"demo", "test"} <= set(re.findall(r"^make (\w+)", Path(ROOT / "README.md").read_text(), re.MULTILINE))
