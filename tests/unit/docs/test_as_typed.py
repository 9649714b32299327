"""README and how-tos, as typed: every line of a shell is a command that exists, and what it is given is accepted.

What takes a fleet, a cluster or a network is not started. Of servers the settings are decoded in full, of vLLM's own
server the flags are read by vLLM and checked as at its start, and calls by curl are those of routes that there are.
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

from tercet.cli.setting_flags import flags_given
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.protocol.headers import GENERATING
from tercet.router.router_app import OPEN
from tercet.settings import RouterConfig, Settings, decode_settings
from tercet.settings.process_settings import API_KEY_VARIABLE
from tercet_gateway.gateway_settings import ModelRouterConfig, PickerConfig, SidecarConfig
from tercet_planner.planner_settings import PlannerConfig

from .pages import ROOT, Block, blocks, place
from .test_commands import PUNCTUATION, command_lines, is_stop, of_command

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
