"""Which fleet a command takes: the named one, the only one, or none, with the list of those that run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tercet.cli import app
from tercet.cli.detached import _chosen
from tercet.cli.which_fleet import HERE, WhichFleet, is_at, others_in_words, the_one, url_of
from tercet.cluster.detached_fleets import DetachedFleet, announced, own_start
from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest, EngineError
from tercet_gateway.commands.upgrade import UpgradeFlags

Announce = Callable[..., DetachedFleet]


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Announce]:
    """Record fleets of this test only, all of this process."""
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path))
    monkeypatch.delenv("TERCET_URL", raising=False)
    with ExitStack() as stack:

        def record(port: int, url: str = "", detached: bool = True) -> DetachedFleet:
            fleet = DetachedFleet(
                own_start(), port, url or f"http://127.0.0.1:{port}", str(tmp_path), 1.0, f"/{port}", detached
            )
            stack.enter_context(announced(fleet))
            return fleet

        yield record


def test_the_only_fleet_is_taken_and_of_several_none(announce: Announce, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WhichFleet().router_url() == HERE
    announce(23000, "https://127.0.0.1:23000")
    assert WhichFleet().router_url() == "https://127.0.0.1:23000"
    announce(23010)
    with pytest.raises(BadRequest, match="--port: fleets run at the ports 23000, 23010; give one of them"):
        WhichFleet().router_url()
    assert WhichFleet(port=23000).router_url() == "https://127.0.0.1:23000"
    assert WhichFleet(port=1).router_url() == "http://127.0.0.1:1"
    assert WhichFleet("http://10.0.0.5:8000").router_url() == "http://10.0.0.5:8000"
    monkeypatch.setenv("TERCET_URL", "http://10.0.0.5:8000")
    assert WhichFleet("http://10.0.0.5:8000", 23010).router_url() == "http://127.0.0.1:23010"
    with pytest.raises(BadRequest, match="--port: cannot be combined with --url"):
        WhichFleet("http://10.0.0.6:8000", 23010).router_url()


def test_fleets_at_one_port_are_told_by_their_urls(announce: Announce) -> None:
    one, other = announce(23000), DetachedFleet(own_start(), 23000, "http://10.0.0.9:23000", "", 1.0)
    with pytest.raises(BadRequest, match=r"fleets run at http://127\.0\.0\.1:23000, http://10\.0\.0\.9:23000; give"):
        the_one([one, other])
    assert WhichFleet("http://10.0.0.9:23000").among([other]) == [other]


def test_a_url_of_another_machine_is_not_the_fleet_at_that_port_here(announce: Announce) -> None:
    fleet = announce(80)
    assert is_at(fleet, "http://localhost")
    assert is_at(fleet, "http://127.0.0.2:80/")  # an address of this machine
    assert not is_at(fleet, "http://127.0.0.1:81")
    assert not is_at(fleet, "http://203.0.113.7")
    assert not is_at(fleet, "http://..")


def test_who_is_not_reached_is_followed_by_who_can_be(announce: Announce) -> None:
    assert others_in_words("http://10.0.0.5:8000") == ""
    assert "start a fleet with `tercet up`" in others_in_words(HERE)
    announce(23000)
    assert others_in_words(HERE) == "; a fleet runs here: give --port 23000"
    for port in range(23001, 23010):
        announce(port)
    assert others_in_words(HERE).endswith("--port 23007 or 2 more")


@pytest.mark.parametrize("line", ["status", "program", "trace", "top", "engines drain e", "chat"])
def test_a_command_that_reaches_no_router_lists_the_fleets(
    line: str, announce: Announce, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(23000)
    (port,) = free_ports("127.0.0.1", 1)
    monkeypatch.setattr("sys.stdin", open(os.devnull) if line != "chat" else _question())  # noqa: SIM115
    assert app._run([*line.split(), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tercet: no router answers at http://127.0.0.1:{port}: ")
    assert said.endswith("; a fleet runs here: give --port 23000\n")


def _question() -> object:
    import io

    return io.StringIO("hello")


def test_down_and_scale_take_what_the_variable_names(
    announce: Announce, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = announce(23000)
    announce(23010, detached=False)
    url = "http://localhost:23000/"
    monkeypatch.setenv("TERCET_URL", url)
    assert _chosen(WhichFleet(url), every=False) == [one]
    assert _chosen(WhichFleet(url), every=True) == [one]
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:23010 is not in the background: Ctrl-C"):
        _chosen(WhichFleet(port=23010), every=False)
    with pytest.raises(EngineError, match=r"runs here at http://10\.0\.0\.5:1, but at 23000"):
        _chosen(WhichFleet("http://10.0.0.5:1"), every=False)
    assert app._run(["scale", "--port", "1"]) == 1
    assert "runs here at port 1, but at 23000, 23010" in capsys.readouterr().err
    assert app._run(["down", "--all", "--url", "http://127.0.0.1:1"]) == 2
    assert "--all: cannot be combined with --url" in capsys.readouterr().err


def test_an_upgrade_replaces_the_only_other_fleet(announce: Announce) -> None:
    announce(23000)
    assert UpgradeFlags(config=Path("new.yaml")).both_urls() == ("http://127.0.0.1:23000", None)
    announce(23010)
    assert UpgradeFlags(to="23010").both_urls() == ("http://127.0.0.1:23000", "http://127.0.0.1:23010")
    with pytest.raises(BadRequest, match="--from: fleets run at the ports 23000, 23010"):
        UpgradeFlags(config=Path("new.yaml")).both_urls()
    with pytest.raises(BadRequest, match="--to: '0' is not a URL"):
        url_of("0", "--to")


def test_a_planner_takes_the_only_fleet(announce: Announce, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(23000)
    planned: list[str] = []
    monkeypatch.setattr("tercet_planner.live_planner.serve_planner", lambda config: planned.append(config.url))
    for given in ([], ["--port", "23010"], ["--url", "http://10.0.0.5:1"]):
        assert app._run(["planner", *given]) == 0
    assert planned == ["http://127.0.0.1:23000", "http://127.0.0.1:23010", "http://10.0.0.5:1"]
