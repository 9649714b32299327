"""What `tercet up` tells its router arrives there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import typer

import tercet
from tercet.cli import app
from tercet.cli.up import serve_router
from tercet.cluster import local
from tercet.cluster.local import router_argv, router_config
from tercet.cluster.ports import free_ports
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.router.server import stream_port
from tercet.router.workers import Shared
from tercet.settings import (
    DiscoverySettings,
    EngineAddress,
    Limits,
    RetryBudget,
    RouterConfig,
    RouterSettings,
    Settings,
    declared,
    decode_settings,
    read_yaml,
)
from tercet.settings.engine_addresses import engine_address


def free_port() -> int:
    (port,) = free_ports("127.0.0.1", 1)
    return port


def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> RouterConfig:
    """The configuration that the router of `tercet up` with these flags would serve with."""
    found: list[RouterConfig] = []
    monkeypatch.setattr("tercet.router.server.serve", found.append)
    monkeypatch.setattr("tercet.cluster.model.known_model", lambda name: name)
    engine = EngineAddress("e", "http://127.0.0.1:1", "decode")

    def start(config: UpConfig, _: object) -> None:
        argv = router_argv(router_config(config, str(tmp_path), free_port(), [engine]), tmp_path)
        monkeypatch.setattr("sys.argv", argv[2:])
        with pytest.raises(SystemExit) as ended:
            serve_router()
        assert ended.value.code == 0

    monkeypatch.setattr("tercet.cli.up.run_fleet", start)
    assert app._run(["up", *flags]) == 0
    (config_there,) = found
    return config_there


def test_what_up_is_told_arrives_at_its_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scheduling.yaml"
    file.write_text("plugins: []\nschedulingProfiles: [{name: mine}]\n")
    (tmp_path / "up.yaml").write_text(
        "router-args: [--api-key, x]\nmodel-aliases: [a, b]\nretries: 5\nreturn-after: 7\n"
    )
    there = received(
        tmp_path, monkeypatch, "--config", str(tmp_path / "up.yaml"), "--dev",
        "--program", "balanced", "--program-arg", "balance_ratio=0.5", "--scheduling", str(file), "--retries", "0",
        "--max-in-flight", "9", "--max-in-flight-per-engine", "3", "--max-in-flight-tokens",
        "10000", "--max-in-flight-tokens-per-engine", "4000", "--max-queued", "0", "--queue-timeout", "2.5",
        "--request-timeout", "60", "--max-request-bytes", "1234", "--stream-port", "7000",
    )  # fmt: skip
    assert (there.dev, there.model_aliases, there.vllm_args) == (True, ("a", "b"), ("--api-key", "x"))
    assert (there.program, there.program_args) == ("balanced", {"balance_ratio": "0.5"})
    assert [(engine.name, engine.role) for engine in there.engines] == [("e", "decode")]
    assert there.scheduling == str(file)
    assert there.retries == RetryBudget(retries=0)
    assert there.limits == Limits(
        in_flight=9, in_flight_per_engine=3, tokens=10_000, tokens_per_engine=4_000, queued=0, queue_timeout_s=2.5
    )
    assert (there.request_timeout_s, there.max_request_bytes) == (60.0, 1234)
    assert (there.return_after, there.stream_port) == (7, 7000)


def test_every_setting_of_a_router_is_one_of_up_too() -> None:
    """So that none is lacking there: what up is told besides is what it decides itself."""
    up = {each.key: each for each in declared(UpConfig)}
    own = {each.key for each in declared(RouterConfig)} - {each.key for each in declared(RouterSettings)}
    in_pods = {each.key for each in declared(DiscoverySettings)}
    # A fleet of one machine is asked by its own commands, at the port for clients; it makes the key for its router, and
    # has engines.
    own -= {"admin-listen", "supervisor-key", "await-engines"}
    in_files = {"engine-ca", "engine-cert", "engine-key"}
    assert own == in_pods | in_files | {"engines", "port", "log-level", "state", "state-configmap", "state-ray"}
    assert all(up[each.key] == each for each in declared(RouterSettings))


@pytest.mark.parametrize(("command", "kind"), [("up", UpConfig), ("router", RouterConfig)])
def test_every_flag_comes_from_the_one_declaration(command: str, kind: type[Settings]) -> None:
    group: Any = typer.main.get_command(app.app)
    flags = {flag for option in group.commands[command].params for flag in option.opts if flag.startswith("--")}
    assert flags == {each.flag for each in declared(kind) if each.flag} | {"--config", "--help-all"}


def test_the_routers_settings_are_for_the_eyes_of_its_owner(tmp_path: Path) -> None:
    config = RouterConfig(engines=(EngineAddress("e", "http://e"),), vllm_args=("--api-key", "secret"))
    argv = router_argv(config, tmp_path)
    assert "secret" not in " ".join(argv)
    assert (tmp_path / "router.json").stat().st_mode & 0o777 == 0o600
    assert decode_settings(RouterConfig, read_yaml(tmp_path / "router.json")) == config


def test_variables_were_heard_when_the_file_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERCET_RETRIES", "1")
    assert received(tmp_path, monkeypatch).retries.retries == 1
    assert local.router_env("m")["TERCET_RETRIES"] is None


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--max-in-flight", "0"), "--max-in-flight"),
        (("--max-queued", "-1"), "--max-queued"),
        (("--max-queued", "many"), "--max-queued"),
        (("--queue-timeout", "0"), "--queue-timeout"),
        (("--queue-timeout", "nan"), "--queue-timeout"),
        (("--retries", "-1"), "--retries"),
        (("--request-timeout", "0"), "--request-timeout"),
        (("--request-timeout", "nan"), "--request-timeout"),
        (("--max-request-bytes", "0"), "--max-request-bytes"),
        (("--scheduling", "/nowhere.yaml"), "scheduling: /nowhere.yaml"),
        (("--engine", "http://127.0.0.1:2,label.=x"), "label"),
        (("--engine", "http://127.0.0.1:2,zone=x"), "zone"),
    ],
)
def test_bad_flags_end_with_one_line_and_exit_code_2(
    flags: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tercet.router.server.serve", lambda _: pytest.fail("it was served"))
    monkeypatch.setattr("tercet.cluster.model.known_model", lambda name: name)
    assert app._run(["router", "--engine", "http://127.0.0.1:1", "--port", str(free_port()), *flags]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", ["max-in-flight", "queue-timeout", "request-timeout", "stuck-after"])
def test_the_same_in_the_file_of_up(tmp_path: Path, key: str) -> None:
    (tmp_path / "up.yaml").write_text(f"{key}: 0\n")
    with pytest.raises(BadRequest, match=key):
        decode_settings(UpConfig, read_yaml(tmp_path / "up.yaml"))


def test_ports_of_token_streams() -> None:
    engines = (engine_address("http://127.0.0.1:1", 0),)
    config = RouterConfig(model="m", served_model_name="m", engines=engines, workers=3, stream_port=7000)
    workers = [cast(Shared, SimpleNamespace(index=index)) for index in range(3)]
    assert [stream_port(config, worker) for worker in (None, *workers)] == [7000, 7000, 7001, 7002]
    free = msgspec.structs.replace(config, stream_port=0)
    assert [stream_port(free, worker) for worker in (None, *workers)] == [0, 0, 0, 0]
    with pytest.raises(BadRequest, match="stream-port"):
        RouterConfig(model="m", served_model_name="m", engines=engines, workers=3, stream_port=65534)


def test_labels_of_engines() -> None:
    address = engine_address("http://h:1,role=decode,label.zone=a,label.gpu=h100", 3)
    assert (address.name, address.role, address.labels) == ("engine-3", "decode", {"zone": "a", "gpu": "h100"})


def test_neither_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = received(tmp_path, monkeypatch)
    assert (there.dev, there.model_aliases, there.return_after) == (False, (), 5)
    assert (there.scheduling, there.retries, there.limits) == (None, RetryBudget(), Limits())
    assert (there.request_timeout_s, there.max_request_bytes) == (None, 64 * 1024 * 1024)


# ---- who reaches it ------------------------------------------------------------------------------------------


def started(monkeypatch: pytest.MonkeyPatch, command: str, *flags: str) -> int:
    monkeypatch.setattr("tercet.router.server.serve", lambda _: None)
    monkeypatch.setattr("tercet.cluster.model.known_model", lambda name: name)
    if command == "up":
        monkeypatch.setattr("tercet.cluster.model.resolve_model", lambda *_: pytest.fail("a model was loaded"))
    engine = ("--engine", "http://127.0.0.1:1") if command == "router" else ()
    return app._run([command, *engine, "--port", str(free_port()), *flags])


@pytest.mark.parametrize("command", ["router", "up"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
@pytest.mark.parametrize("key", [None, "", "--api-key="])
def test_a_door_that_strangers_reach_without_a_key_does_not_start(
    command: str, host: str, key: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "") if key == "" else monkeypatch.delenv("VLLM_API_KEY", raising=False)
    rest = ("--", key) if key and command == "router" else ()
    assert started(monkeypatch, command, "--host", host, *rest) == 2
    said = capsys.readouterr().err
    assert "clients need no key" in said
    assert "--open-to-all" in said


@pytest.mark.parametrize(
    "more", [("--open-to-all",), ("--", "--api-key", "k"), ("--", "--uds", "/run/x"), ("file",), ("variable",)]
)
def test_a_door_with_a_key_or_on_purpose_starts(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "keys").write_text("k\n")
    if more == ("variable",):
        monkeypatch.setenv("VLLM_API_KEY", "k")
        more = ()
    if more == ("file",):
        more = ("--api-key-file", str(tmp_path / "keys"))
    monkeypatch.setattr("tercet.cluster.ports.require_free", lambda *_: None)
    assert started(monkeypatch, "router", "--host", "192.0.2.1", *more) == 0


@pytest.mark.parametrize(
    "rest", [("--api-key", ""), ("--api-key=",), ("--api-key", "  "), ("--api-key", "schl\u00fcssel")]
)
def test_a_key_that_is_given_is_one(
    rest: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("tercet.cluster.ports.require_free", lambda *_: None)
    assert started(monkeypatch, "router", "--", *rest) == 2
    said = capsys.readouterr().err
    assert "--api-key: " in said
    assert "blank" in said or "ASCII" in said


@pytest.mark.parametrize("name", ["--api-key-file", "--admin-key-file"])
def test_a_file_of_keys_is_read_before_anything_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("\n")
    for command in ("router", "up"):
        assert started(monkeypatch, command, name, str(tmp_path / "keys")) == 2
        assert "has no key" in capsys.readouterr().err


@pytest.mark.parametrize("blank", ["\n", "  ", "\t\n"])
def test_a_blank_admin_key_is_refused(
    blank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERCET_ADMIN_KEY", blank)
    assert started(monkeypatch, "router") == 2
    assert "TERCET_ADMIN_KEY: the key is blank" in capsys.readouterr().err


def help_of(command: str, page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "100")
    assert app._run([command, page]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("command", "kind"), [("up", UpConfig), ("router", RouterConfig)])
def test_help_fits_on_two_screens_and_names_every_flag(
    command: str, kind: type[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = help_of(command, "--help", capsys, monkeypatch)
    assert len(lines) <= 2 * 60, "two screens of 60 lines"
    assert {each.flag for each in declared(kind) if each.flag} <= {word for line in lines for word in line.split()}
    assert {"Model", "Engines", "Programs and placement", "Limits", "Failures", "Moves", "Observability"} <= {*lines}


@pytest.mark.parametrize(("command", "kind"), [("up", UpConfig), ("router", RouterConfig)])
def test_the_long_help_has_what_only_the_file_sets(
    command: str, kind: type[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {word for line in help_of(command, "--help-all", capsys, monkeypatch) for word in line.split()}
    in_file = [each for each in declared(kind) if each.setting.in_file]
    assert len(in_file) > 10
    assert {f"{each.key}:" for each in in_file} <= words
    assert {each.flag for each in declared(kind) if each.flag} <= words


def test_no_message_of_the_router_names_a_flag_that_is_a_key_of_the_file() -> None:
    keys = {each.key for each in declared(RouterConfig) if each.setting.in_file}
    assert "max-long-queued" in keys
    source = Path(tercet.__file__).parent
    rooms = [path for room in ("router", "fleet", "wire") for path in (source / room).rglob("*.py")]
    named = {flag for path in rooms for flag in re.findall(r"--([a-z][a-z-]+)", path.read_text(encoding="utf-8"))}
    assert not named & keys
