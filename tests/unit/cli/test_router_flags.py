"""What `tercet up` tells its front door arrives there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tercet.cli import app
from tercet.cli.options import engine_address
from tercet.cluster.local import RunningEngine, router_argv
from tercet.cluster.process import Process
from tercet.cluster.spec import UpConfig, load_up_config
from tercet.protocol import BadRequest
from tercet.router import RouterConfig
from tercet.router.admission import Limits
from tercet.router.recovery import RetryBudget
from tercet.router.server import stream_port
from tercet.router.workers.sharing import Shared


def received(config: UpConfig, model: Path, monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    """The configuration that the front door started by ``config`` would serve with."""
    found: list[RouterConfig] = []
    monkeypatch.setattr("tercet.cli.router.serve", found.append)
    monkeypatch.setattr("tercet.cli.router.resolve_model", lambda name, _: name)
    engine = RunningEngine("e", "decode", "http://127.0.0.1:1", Process("e", [], {}, model / "log"))
    argv = router_argv(config, str(model), 18764, [engine])
    assert app._run(argv[argv.index("router") :]) == 0
    (config_there,) = found
    return config_there


def test_development_mode_and_names_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"dev": True, "model-aliases": ["a", "b"], "router-args": ["--api-key", "x"], "program": "balanced"}
    there = received(load_up_config(None, flags), tmp_path, monkeypatch)
    assert (there.dev, there.model_aliases, there.vllm_args) == (True, ("a", "b"), ("--api-key", "x"))
    assert [(engine.name, engine.role) for engine in there.engines] == [("e", "decode")]


def test_limits_retries_and_the_scheduling_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scheduling.yaml"
    file.write_text("plugins: []\nschedulingProfiles: [{name: mine}]\n")
    flags = {
        "scheduling": str(file), "retries": 0, "retry-within": 5, "max-in-flight": 9, "max-in-flight-per-engine": 3,
        "max-in-flight-tokens": 10_000, "max-in-flight-tokens-per-engine": 4_000, "max-queued": 0,
        "queue-timeout": 2.5, "request-timeout": 60, "max-request-bytes": 1234,
    }  # fmt: skip
    there = received(load_up_config(None, flags), tmp_path, monkeypatch)
    assert there.scheduling == str(file)
    assert there.retries == RetryBudget(retries=0, within=5.0)
    assert there.limits == Limits(
        in_flight=9, in_flight_per_engine=3, tokens=10_000, tokens_per_engine=4_000, queued=0, queue_seconds=2.5
    )
    assert (there.request_timeout, there.max_request_bytes) == (60.0, 1234)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--max-in-flight", "0"), "--max-in-flight"),
        (("--max-queued", "-1"), "--max-queued"),
        (("--max-queued", "many"), "--max-queued"),
        (("--queue-timeout", "0"), "--queue-timeout"),
        (("--queue-timeout", "nan"), "--queue-timeout"),
        (("--retry-within", "-2"), "--retry-within"),
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
    monkeypatch.setattr("tercet.cli.router.serve", lambda _: pytest.fail("it was served"))
    monkeypatch.setattr("tercet.cli.router.resolve_model", lambda name, _: name)
    assert app._run(["router", "--engine", "http://127.0.0.1:1", "--port", "18765", *flags]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", ["max-in-flight", "queue-timeout", "request-timeout", "retry-within"])
def test_the_same_in_the_file_of_up(tmp_path: Path, key: str) -> None:
    (tmp_path / "up.yaml").write_text(f"{key}: 0\n")
    with pytest.raises(BadRequest, match=key):
        load_up_config(tmp_path / "up.yaml", {})


def test_ports_of_token_streams() -> None:
    engines = (engine_address("http://127.0.0.1:1", 0),)
    config = RouterConfig(model="m", served_model_name="m", engines=engines, workers=3, stream_port=7000)
    workers = [cast(Shared, SimpleNamespace(index=index)) for index in range(3)]
    assert [stream_port(config, worker) for worker in (None, *workers)] == [7000, 7000, 7001, 7002]
    free = msgspec.structs.replace(config, stream_port=0)
    assert [stream_port(free, worker) for worker in (None, *workers)] == [0, 0, 0, 0]
    with pytest.raises(BadRequest, match="stream_port"):
        RouterConfig(model="m", served_model_name="m", engines=engines, workers=3, stream_port=65534)


def test_labels_of_engines() -> None:
    address = engine_address("http://h:1,role=decode,label.zone=a,label.gpu=h100", 3)
    assert (address.name, address.role, address.labels) == ("engine-3", "decode", {"zone": "a", "gpu": "h100"})


def test_neither_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = received(load_up_config(None, {}), tmp_path, monkeypatch)
    assert (there.dev, there.model_aliases, there.return_after) == (False, (), 5)
    assert (there.scheduling, there.retries, there.limits) == (None, RetryBudget(), Limits())
    assert (there.request_timeout, there.max_request_bytes) == (None, 64 * 1024 * 1024)
