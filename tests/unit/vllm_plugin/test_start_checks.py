"""What Tercet refuses of an engine is refused by its flags and its config, before vLLM loads anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tercet.cluster.engine_command import EngineSpec, engine_env, flags_argv
from tercet.cluster.model import resolve_model
from tercet.protocol import BadRequest
from tercet.settings import SECRET_VARIABLE
from tercet.settings.process_settings import API_KEY_VARIABLE
from tercet.vllm_plugin.connector import TercetConnector
from tercet.vllm_plugin.differences import cli_args
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.start import start_checks
from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence
from tercet.vllm_plugin.start.siblings_config import settings_of, with_siblings
from tercet.vllm_plugin.start.start_checks import check_before_loading, require_both_roles, require_memory_that_stays

make_arg_parser = cli_args().make_arg_parser

CONNECTOR = {
    "kv_connector": "TercetConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "tercet.vllm_plugin.connector",
}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
SERVER = ["--model", "tercet/none"]
LOOPBACK = ["--host", "127.0.0.1"]


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "tercet")
    for name in (SECRET_VARIABLE, API_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checked() -> Iterator[None]:
    """The checks are installed, and gone afterwards."""
    before = {name: vars(EngineArgs)[name] for name in ("from_cli_args", "create_engine_config")}
    try:
        check_before_loading()
        check_before_loading()
        yield
    finally:
        for name, original in before.items():
            setattr(EngineArgs, name, original)


def flags(*given: str, extra: dict[str, Any] | None = None, **changed: Any) -> list[str]:
    transfer = {**CONNECTOR, **changed, **({"kv_connector_extra_config": extra} if extra else {})}
    return [*SERVER, *given, "--kv-transfer-config", json.dumps(transfer)]


def multi(*children: Any) -> list[str]:
    return flags(
        *LOOPBACK, extra={"connectors": children}, kv_connector="MultiConnector", kv_connector_module_path=None
    )


def beside(*siblings: Any) -> list[str]:
    return flags(*LOOPBACK, extra={"beside": siblings})


def parsed(argv: list[str]) -> Namespace:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    assert args is not None
    return args


def refusal_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        AsyncEngineArgs.from_cli_args(parsed(argv))
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (flags(), "--host: other machines can reach the verbs of an engine at any address"),
        (flags("--host", "0.0.0.0"), "--host: other machines can reach the verbs of an engine at 0.0.0.0"),
        (flags("--host", "::"), "--host: other machines can reach"),
        (flags("--api-key", " "), "--api-key: the key is blank"),
        (flags(*LOOPBACK, extra={"no_such_key": 1}), "no_such_key"),
        (flags(*LOOPBACK, extra={"lease_ttl": "soon"}), "lease_ttl"),
        (flags(*LOOPBACK, extra={"host": "192.0.2.1"}), "host: other machines can reach 192.0.2.1"),
        (flags(*LOOPBACK, extra={"prefill_hosts": "::::"}), "prefill_hosts"),
        (flags(*LOOPBACK, "--api-server-count", "2"), "--api-server-count: is 2"),
        (flags(*LOOPBACK, extra={"beside": {"kv_connector": 1}}), "beside[0]: kv_connector is missing"),
        (flags(*LOOPBACK, extra={"beside": "ExampleConnector"}), "beside"),
        (beside({"kv_role": "kv_both"}), "beside[0]: kv_connector is missing: name a connector of vLLM"),
        (beside(EXAMPLE, CONNECTOR), "beside[1]: TercetConnector is the engine's connector already: leave it out"),
        (beside({"kv_connector": "MultiConnector"}), "MultiConnector cannot be a sibling: list its connectors"),
        (beside({"kv_connector": "NoSuchConnector"}), "beside[0]: NoSuchConnector: Unsupported connector type"),
        (beside({**EXAMPLE, "kv_connector_module_path": "no.such"}), "ExampleConnector: No module named 'no'"),
        (beside({**EXAMPLE, "kv_role": "writer"}), "beside[0]: ExampleConnector: kv_role: "),
        (beside({**EXAMPLE, "colour": 1}), "beside[0]: ExampleConnector: colour: "),
        (beside({**EXAMPLE, "engine_id": "e"}), "engine_id is that of the whole config"),
        (multi(CONNECTOR, EXAMPLE), "TercetConnector is among the connectors of a MultiConnector"),
        (
            multi(EXAMPLE, {**EXAMPLE, "kv_connector_extra_config": {"connectors": [CONNECTOR]}}),
            "it must be the engine's",
        ),
    ],
)
@pytest.mark.usefixtures("checked")
def test_flags_are_refused_at_once_with_a_sentence(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = refusal_of(argv, capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("tercet: ")
    assert said in error


@pytest.mark.usefixtures("checked")
def test_a_blank_secret_is_refused_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "\n")
    assert f"{SECRET_VARIABLE}: the key is blank" in refusal_of(flags(*LOOPBACK), capsys)[1]


@pytest.mark.parametrize(
    "argv",
    [
        flags(*LOOPBACK),
        flags("--uds", "/run/vllm.sock"),
        flags("--api-key", "key"),
        flags("--headless"),
        SERVER,
        flags(kv_connector="ExampleConnector", kv_connector_module_path=None),
        multi(EXAMPLE, EXAMPLE),
        multi("not a connector", {"kv_connector_extra_config": 3}),
    ],
)
@pytest.mark.usefixtures("checked")
def test_other_servers_start(argv: list[str]) -> None:
    assert AsyncEngineArgs.from_cli_args(parsed(argv)).model == "tercet/none"


@pytest.mark.parametrize(("name", "value"), [(SECRET_VARIABLE, "secret"), (API_KEY_VARIABLE, "key")])
@pytest.mark.usefixtures("checked")
def test_a_key_of_the_environment_lets_it_start(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert AsyncEngineArgs.from_cli_args(parsed(flags())).model == "tercet/none"


@pytest.mark.usefixtures("checked")
def test_without_verbs_there_is_nothing_that_strangers_could_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS")
    assert AsyncEngineArgs.from_cli_args(parsed(flags())).model == "tercet/none"
    assert EngineArgs.from_cli_args(Namespace(model="tercet/none")).model == "tercet/none"


def test_an_engine_whose_kv_cannot_be_moved_is_refused_by_its_config(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config.kv_transfer_config is not None
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda *_: config)
    monkeypatch.setattr(EngineArgs, "from_cli_args", vars(EngineArgs)["from_cli_args"])
    check_before_loading()
    create: Any = EngineArgs.create_engine_config
    assert create(None) is config
    monkeypatch.setattr(config.kv_transfer_config, "kv_role", "kv_producer")
    with pytest.raises(SystemExit) as ended:
        create(None)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (1, 1)
    assert "kv_role is 'kv_producer'" in error
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector", "ExampleConnector")
    assert create(None) is config
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", {"connectors": [EXAMPLE, CONNECTOR]})
    with pytest.raises(SystemExit) as ended:
        create(None)
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max-model-len", "-5"], "--max-model-len: Input should be greater than or equal to -1, is '-5'"),
        (["--max-model-len", "99999999"], "flags for vLLM: User-specified max_model_len (99999999) is greater than"),
        (["--enable-eplb"], "flags for vLLM: "),
    ],
)
def test_what_vllms_configuration_refuses_is_one_line(
    given: list[str], said: str, checked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = resolve_model("smollm2")
    argv = ["--model", model, *LOOPBACK, *given, "--kv-transfer-config", json.dumps(CONNECTOR)]
    args = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(argv))
    with pytest.raises(SystemExit) as ended:
        args.create_engine_config()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert last.startswith(f"tercet: {said}")
    assert len(last) < 600


def test_a_model_whose_files_cannot_be_read_is_one_line_too(
    tmp_path: Path, checked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("# no JSON")
    argv = ["--model", str(tmp_path), *LOOPBACK, "--kv-transfer-config", json.dumps(CONNECTOR)]
    args = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(argv))
    with pytest.raises(SystemExit) as ended:
        args.create_engine_config()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code in (1, 2)
    assert last.startswith("tercet: vLLM cannot read the model: ")


@pytest.mark.processes
def test_the_plain_command_says_it_before_anything_loads() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags("--port", "0")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("tercet: --host: other machines can reach")
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("sibling", "in_groups"), [("ExampleConnector", False), ("OffloadingConnector", True)])
def test_siblings_are_made_by_a_multi_connector(sibling: str, in_groups: bool, tmp_path: Path) -> None:
    argv = flags(*LOOPBACK, extra={"lease_ttl": 5, "beside": [{"kv_connector": sibling}]})
    argv[1] = str(resolve_model("smollm2"))
    config = AsyncEngineArgs.from_cli_args(parsed(argv)).create_engine_config()
    transfer = config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "MultiConnector"
    assert KVConnectorFactory.get_connector_class(transfer).__module__ == transfer.kv_connector_module_path
    own, other = transfer.kv_connector_extra_config["connectors"]
    assert (own["kv_connector"], own["kv_connector_extra_config"]) == ("TercetConnector", {"lease_ttl": 5})
    assert settings_of(transfer) == {"lease_ttl": 5}
    assert other == {"kv_connector": sibling, "kv_role": "kv_both"}
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is not in_groups
    assert with_siblings(transfer) is transfer, "a config may be made twice of the same arguments"


# How an engine must be started for its KV to be moved, and what it is told otherwise.


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_sends_and_receives(role: str) -> None:
    """By this role vLLM keeps blocks back that a step under way still writes into."""

    def config(role: str) -> Any:
        return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=role))

    require_both_roles(config("kv_both"))
    with pytest.raises(UnsupportedVLLM, match=rf"kv_role is '{role}'.*set it to 'kv_both'"):
        require_both_roles(config(role))


def test_kv_stays_where_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=True))
    require_memory_that_stays(config)  # on a CPU, vLLM takes none away
    monkeypatch.setattr(start_checks, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(UnsupportedVLLM, match="--enable-sleep-mode"):
        require_memory_that_stays(config)
    config.model_config.enable_cumem_allocator = False
    require_memory_that_stays(config)
    assert not TercetConnector.supports_sleep_mode(None)


# What vLLM's parser says of wrong flags, once it says it in a sentence.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--max-model-length", "3"], "unrecognized arguments: --max-model-length 3; did you mean --max-model-len?"),
        (["--zzz"], "unrecognized arguments: --zzz; `vllm serve --help=all` lists them"),
        (["--max-model-len", "many"], "argument --max-model-len: invalid int value: 'many'"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_wrong_flag_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    monkeypatch.setattr(FlexibleArgumentParser, "error", FlexibleArgumentParser.error)
    refuse_in_a_sentence()
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-model-len", type=int)
    with pytest.raises(BadRequest) as raised:
        parser.parse_args(given)
    assert raised.value.message == f"flags for vLLM: {says}"
    assert capfd.readouterr() == ("", "")


# An engine's flags as vLLM checks them in a process of their own: refused in one line, and nothing is loaded.

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
