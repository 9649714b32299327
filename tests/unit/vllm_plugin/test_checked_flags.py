"""An engine's flags as vLLM checks them in a process of their own: refused in one line, and nothing is loaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tercet.cluster.engine_command import EngineSpec, engine_env, flags_argv
from tercet.cluster.model import resolve_model

PARSER = str(Path(__file__).resolve().parents[2] / "engines" / "thinking_parser.py")


def spec_with(*flags: str) -> EngineSpec:
    return EngineSpec(
        name="decode-0",
        model=resolve_model("smollm2"),
        served_model_name="smollm2",
        host="127.0.0.1",
        port=8001,
        built_in=True,
        cores=(0,),
        extra_args=flags,
    )


def test_only_what_a_user_chose_is_checked() -> None:
    plain = spec_with()
    assert flags_argv(plain) == []
    assert flags_argv(msgspec.structs.replace(plain, simulate="any", built_in=False)) == []
    for chosen in (
        spec_with("--max-num-seqs", "8"),
        msgspec.structs.replace(plain, dtype="float32"),
        msgspec.structs.replace(plain, built_in=False),
    ):
        assert flags_argv(chosen)[3:5] == ["--model", plain.model]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-model-len", "-5"], "tercet: --max-model-len: Input should be greater"),
        (["--max-model-length", "5"], "tercet: flags for vLLM: unrecognized arguments: --max-model-length"),
        (["--max-num-seqs", "8"], ""),
        (["--reasoning-parser", "until-full-stop", "--reasoning-parser-plugin", PARSER], ""),
    ],
    ids=["value", "name", "accepted", "parser of the user"],
)
def test_vllm_says_it_in_one_line(flags: list[str], said: str, tmp_path: Path) -> None:
    spec = spec_with(*flags)
    env = {**os.environ, **engine_env(spec)}
    done = subprocess.run(flags_argv(spec), capture_output=True, text=True, env=env, cwd=tmp_path, timeout=200)
    assert done.returncode == (2 if said else 0), done.stderr[-3000:]
    assert not said or done.stderr.splitlines()[-1].startswith(said)
