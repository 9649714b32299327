"""Pinning, the vLLM command, the YAML file and the flags: pure functions and their complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tercet.cli.app import app
from tercet.cli.options import engine_address
from tercet.cluster.engine_command import EngineSpec, as_shell, engine_argv, engine_env
from tercet.cluster.pinning import as_cpu_list, split_cores
from tercet.cluster.spec import UpConfig, load_up_config
from tercet.protocol import BadRequest, TercetError


@given(st.sets(st.integers(0, 63), min_size=1, max_size=40), st.integers(1, 20))
def test_every_engine_gets_cores_and_none_is_shared_needlessly(cores: set[int], engines: int) -> None:
    groups = split_cores(sorted(cores), engines)
    assert len(groups) == engines
    assert all(groups)
    if len(cores) >= engines:
        assert sorted(core for group in groups for core in group) == sorted(cores)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    else:
        assert {core for group in groups for core in group} == cores


@pytest.mark.parametrize(
    ("cores", "text"),
    [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2), "0,2"), ((5, 1, 2, 3), "1-3,5"), ((7, 8, 10), "7-8,10")],
)
def test_cpu_lists(cores: tuple[int, ...], text: str) -> None:
    assert as_cpu_list(cores) == text


def spec(**changes: object) -> EngineSpec:
    fields = {"name": "p", "model": "/models/m", "served_model_name": "m", "host": "h", "port": 1, "dtype": "float32"}
    return EngineSpec(**{**fields, **changes})  # type: ignore[arg-type]


def value_of(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1, argv
    return argv[argv.index(flag) + 1]


def test_the_command_loads_the_plugin() -> None:
    argv, env = engine_argv(spec(cores=(0, 1))), engine_env(spec(cores=(0, 1)))
    assert json.loads(value_of(argv, "--kv-transfer-config"))["kv_connector"] == "TercetConnector"
    assert (env["VLLM_PLUGINS"], env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("tercet", "0-1", "2")
    assert value_of(argv, "--max-num-batched-tokens") == "512"


@pytest.mark.parametrize("given", [("--max-num-batched-tokens", "64"), ("--max-num-batched-tokens=64",)])
def test_the_callers_flag_wins(given: tuple[str, ...]) -> None:
    argv = engine_argv(spec(cores=(0,), extra_args=given))
    assert tuple(argv[-len(given) :]) == given
    assert "512" not in argv
    assert "--enforce-eager" in argv


def test_engines_on_gpus_get_a_device_and_no_cpu_settings() -> None:
    env = engine_env(spec(gpus=(3,)))
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert not any(name.startswith(("VLLM_CPU", "OMP")) for name in env)
    assert "--enforce-eager" not in engine_argv(spec(gpus=(3,)))


def test_the_shell_command_is_quoted() -> None:
    assert as_shell(["/usr/bin/python3", "-m", "x", "--y", '{"a": 1}'], {"A": "b c"}) == (
        "A='b c' python -m x --y '{\"a\": 1}'"
    )


# ---- configuration -------------------------------------------------------------------------------------------


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("model: m\nprefill: 2\nlog-dir: /tmp/x\nprogram-args: {min_send: '5'}\nengine-args: [--a, b]\n")
    config = load_up_config(file, {"prefill": 3})
    assert (config.model, config.prefill, config.log_dir, config.engine_args) == ("m", 3, "/tmp/x", ("--a", "b"))
    assert config.program_args == {"min_send": "5"}
    assert [name for name, _ in config.roles] == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil: 1", "prefil"),
        ("prefill: many", "prefill"),
        ("prefill: -1", "prefill"),
        ("port: 99999", "port"),
        ("- a\n- b", "not a mapping"),
        ("a: [", "config"),
        ("prefill: 0\ndecode: 0", "no engine"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "up.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=says):
        load_up_config(file, {})


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="No such file"):
        load_up_config(tmp_path / "no.yaml", {})


def test_engine_addresses() -> None:
    found = engine_address("http://h:1/,role=decode,name=d", 0)
    assert (found.url, found.role, found.name) == ("http://h:1", "decode", "d")
    assert engine_address("http://h:1", 4).name == "engine-4"


@pytest.mark.parametrize("given", ["h:1", "http://h:1,role=cook", "http://h:1,rolle=decode", "http://h:1,decode"])
def test_bad_engine_addresses(given: str) -> None:
    with pytest.raises(BadRequest, match="--engine"):
        engine_address(given, 0)


@pytest.mark.parametrize(
    "argv",
    [
        ["up", "--prefill", "x"],
        ["up", "--nonsense"],
        ["up", "stray"],
        ["up", "--prefill", "0", "--decode", "0"],
        ["up", "--program", "nothing"],
        ["up", "--program-arg", "novalue"],
        ["up", "--program-arg", "min_send=many"],
        ["up", "--model", "./not/here"],
        ["up", "--config", "/not/here.yaml"],
        ["engine", "--port", "0"],
        ["engine", "--model", "/not/here"],
        ["router"],
        ["router", "--engine", "nowhere"],
        ["router", "--engine", "http://h:1", "--log-level", "loud"],
        ["nothing"],
    ],
    ids=" ".join,
)
def test_bad_flags_are_refused(argv: list[str]) -> None:
    """Exit code 2 from typer itself, or our own error that `main` turns into it; nothing is started."""
    result = CliRunner().invoke(app, argv)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, BadRequest), result.exception
    else:
        assert result.exit_code == 2


@pytest.mark.parametrize(
    "argv", [["--help"], ["up", "--help"], ["engine", "--help"], ["router", "--help"], ["demo", "--help"]]
)
def test_help(argv: list[str]) -> None:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0
    assert len(result.output) > 200


def test_engine_print_is_the_plain_vllm_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", str(tmp_path), "--print", "--", "--max-num-seqs", "4"])
    assert result.exit_code == 0, result.output
    assert "VLLM_PLUGINS=tercet" in result.output
    assert "python -m vllm.entrypoints.openai.api_server" in result.output
    assert result.output.strip().endswith("--max-num-seqs 4")


def test_errors_of_the_tree_have_a_sentence() -> None:
    assert issubclass(BadRequest, TercetError)
    assert UpConfig().public_name == "smollm2"
