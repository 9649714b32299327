"""``tercet conformance``: its lines, its JSON and its exit code, over real sockets; and its page."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tercet.cli.app import app
from tercet.cluster.ports import free_ports, url_of
from tercet.protocol import BadRequest
from tercet_checks.conformance import CHECKS
from tercet_lab.sim import sim_server
from tercet_lab.sim.sim_server import ServerConfig, serving
from tests.unit.lab.sim.models import profile_of

from .wrong_engine import FAULTS, WrongVerbs

pytestmark = pytest.mark.processes
HOST = "127.0.0.1"
PAGE = Path(__file__).resolve().parents[4] / "docs" / "howto" / "engine.md"


def called(*words: str) -> Result:
    return CliRunner().invoke(app, ["conformance", *words])


async def called_on_an_engine(*words: str, secret: str = "") -> Result:
    (port,) = free_ports(HOST, 1)
    url = url_of(HOST, port)
    async with serving(ServerConfig(name="e", profile=profile_of(), port=port, url=url, model="m", secret=secret)):
        return await asyncio.to_thread(called, url, *words)


async def test_a_sound_engine_has_exit_code_0() -> None:
    result = await called_on_an_engine("--only", "double-release", "--only", "kv-arrives")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines() if line]
    assert lines[1].startswith("passed double-release A lease ends once")
    assert lines[2] == "skipped kv-arrives needs a second engine: --peer URL"
    assert lines[-1] == "2 passed, 0 failed, 1 skipped"


async def test_a_failure_shows_the_call_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = FAULTS["releases what it does not hold"]
    monkeypatch.setattr(sim_server, "SimVerbs", lambda engine, keys, model: WrongVerbs(engine, keys, model, planted))
    result = await called_on_an_engine("--only", "double-release")
    assert result.exit_code == 1
    assert "\ndouble-release: the status is 200, and must be 404\n" in result.stdout
    for line in ("promise  A lease", "sent     POST http", 'came     200 {"valid_end":0}', "remedy   Forget a lease"):
        assert f"\n  {line}" in result.stdout
    result = await called_on_an_engine("--only", "double-release", "--json")
    assert result.exit_code == 1
    status, failed = json.loads(result.stdout)["checks"]
    assert status["state"] == "passed"
    assert (failed["check"], failed["state"], failed["came"]) == ("double-release", "failed", '200 {"valid_end":0}')


async def test_an_engine_that_does_not_answer_fails_one_check_and_the_others_are_skipped() -> None:
    (port,) = free_ports(HOST, 1)
    nowhere = await asyncio.to_thread(called, url_of(HOST, port), "--json")
    # To each wrong proof the engine sends a new challenge.
    stranger = await called_on_an_engine("--json", "--secret", "wrong", secret="s3cret")
    for result, came in ((nowhere, ""), (stranger, "401")):
        assert result.exit_code == 1
        found = json.loads(result.stdout)["checks"]
        assert [each["state"] for each in found] == ["failed", *["skipped"] * (len(CHECKS) - 1)]
        assert found[0].get("came", "").startswith(came)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("nonsense",), "URL: 'nonsense' is not a URL"),
        (("http://127.0.0.1:1", "--peer", "x"), "--peer: 'x' is not a URL"),
        (("http://127.0.0.1:1", "--only", "double-releases"), "did you mean double-release?"),
    ],
)
def test_wrong_words_are_named(words: tuple[str, ...], complaint: str) -> None:
    result = called(*words)
    assert isinstance(result.exception, BadRequest)
    assert complaint in str(result.exception)


def test_the_page_names_every_check() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| subject | checks |")[2]
    assert re.findall(r"`([a-z-]+)`", table.partition("\n\n")[0]) == [each.name for each in CHECKS]
