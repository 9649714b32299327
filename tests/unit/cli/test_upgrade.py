"""`tercet upgrade` as a command: what it refuses, and Ctrl-C while the new router takes over."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tercet.cli.app import exit_code_of
from tercet.cli.upgrade import upgrade
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
