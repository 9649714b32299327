"""`tercet upgrade` as a command: what it refuses, and Ctrl-C while the new router takes over."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web

from tercet.cli.app import exit_code_of
from tercet.protocol import UnknownPath
from tercet_gateway.commands.upgrade import UpgradeFlags, upgrade
from tests.servers import served
from tests.unit.gateway.model_router.test_model_router import Router, world


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "--to: give either --to or --config"),
        ({"to": "http://127.0.0.1:1", "config": Path("new.yaml")}, "--to: give either --to or --config"),
        ({"to": "nonsense"}, "--to: 'nonsense' is not a URL"),
        ({"to": "http://127.0.0.1:1", "steps": "5,x"}, "--steps: must be percentages such as 5,25,50,100, is '5,x'"),
        ({"to": "http://127.0.0.1:1", "steps": "50,20,100"}, "steps: must rise from above 0 to 100 percent"),
        ({"to": "http://127.0.0.1:1", "model_router": "http://127.0.0.1:1"}, "no router answers at http://127.0.0.1:1"),
    ],
)
def test_what_is_refused(given: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    told: dict[str, object] = {
        "old": "http://127.0.0.1:2", "steps": "5,100", "hold": 1.0, "tolerance": 0.01, "drain_timeout": 1.0,
        "keep": False, "admin_key": "", "to": None, "config": None, "model_router": "http://127.0.0.1:3",
    }  # fmt: skip
    code = exit_code_of(lambda: upgrade(**{**told, **given}))
    assert code == (1 if "answers" in said else 2)
    assert said in capsys.readouterr().err


async def test_a_new_fleet_is_not_started_before_the_old_one_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tercet_gateway.commands.upgrade.detach", lambda _: pytest.fail("a fleet is started"))
    async with world(await Router("chat").start()) as found:
        assert await refused_at(found.url) == 2
    assert "--from: the model router has no router at http://127.0.0.1:9; it has" in capsys.readouterr().err


async def test_a_router_is_told_from_a_model_router(capsys: pytest.CaptureFixture[str]) -> None:
    async def unknown(_: web.Request) -> web.Response:
        error = UnknownPath("this server has no such route")
        return web.json_response(error.to_wire(), status=error.status)

    app = web.Application()
    app.router.add_get("/{path:.*}", unknown)
    async with served(app) as url:
        assert await refused_at(url) == 2
    assert f"--model-router: the server at {url} is not a model router" in capsys.readouterr().err


async def refused_at(model_router: str) -> int:
    flags = UpgradeFlags(old="http://127.0.0.1:9", config=Path("new.yaml"), model_router=model_router)
    return await asyncio.to_thread(exit_code_of, lambda: upgrade(**vars(flags)))


@pytest.mark.processes
async def test_ctrl_c_gives_all_requests_back_to_the_old_router() -> None:
    old, new = await Router("chat").start(), await Router("chat").start()
    async with world(old) as found:
        command = [
            sys.executable, "-m", "tercet.cli", "upgrade", "--from", old.url, "--to", new.url, "--model-router",
            found.url, "--steps", "50,100", "--hold", "600",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(120):
                while not any(each.url == new.url and each.weight for each in found.server.routes.backends):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
                process.send_signal(signal.SIGINT)
                said = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 128 + signal.SIGINT, said
        assert "the old fleet gets all requests" in said
        assert [(each.url, each.weight) for each in found.server.routes.backends] == [(old.url, 1.0)]
    await new.running.aclose()
