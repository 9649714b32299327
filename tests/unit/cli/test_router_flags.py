"""What `tercet up` tells its front door arrives there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.cli import app
from tercet.cluster.local import RunningEngine, router_argv
from tercet.cluster.process import Process
from tercet.cluster.spec import UpConfig, load_up_config
from tercet.router import RouterConfig


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


def test_neither_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = received(load_up_config(None, {}), tmp_path, monkeypatch)
    assert (there.dev, there.model_aliases, there.return_after) == (False, (), 5)
