"""A router and its engines must have the same words for the same ids; and an admin address beside vLLM's server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.small_llama import small_llama
from tests.warm import start_guarded

from .conftest import MODEL, START_SECONDS, Fleet, free_port, router_over


def _swap_two_words(directory: Path) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    one, other = "Ġthe", "Ġof"
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(tokenizer))


def _say_another_role(directory: Path) -> None:
    for path in (directory / "tokenizer_config.json", directory / "chat_template.jinja"):
        if path.exists():
            path.write_text(path.read_text().replace("assistant", "helper"))


def copied(to: Path) -> Path:
    """The shared fleet's checkpoint without its weights, which a router does not read."""
    shutil.copytree(small_llama(), to, ignore=shutil.ignore_patterns("*.safetensors"))
    return to


@pytest.mark.parametrize(
    ("change", "what"), [(_swap_two_words, "tokenizer"), (_say_another_role, "chat template")], ids=["words", "roles"]
)  # fmt: skip
def test_a_router_with_other_text_does_not_serve(
    fleet: Fleet, tmp_path: Path, change: Callable[[Path], None], what: str
) -> None:
    model, log = copied(tmp_path / "model"), tmp_path / "router.log"
    change(model)
    command = [
        sys.executable, "-m", "tercet.cli", "router", "--model", str(model), "--served-model-name", MODEL,
        "--port", str(free_port()), *(f"--engine={url},name={name}" for name, url in fleet.engine_urls().items()),
    ]  # fmt: skip
    with log.open("wb") as output:
        process = start_guarded(command, os.environ, output)
        try:
            code = process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            process.communicate()
    said = log.read_text()
    assert code != 0
    assert f"has another {what}" in said
    assert "Traceback" not in said


def test_one_with_a_copy_serves_and_its_admin_routes_are_elsewhere(fleet: Fleet, tmp_path: Path) -> None:
    model, file = copied(tmp_path / "model"), tmp_path / "admin.sock"
    with (
        router_over(fleet.engine_urls(), tmp_path, "--admin-listen", f"unix:{file}", model=model) as url,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(file)), base_url="http://localhost") as admin,
    ):
        body = {"model": MODEL, "prompt": "the cause of", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        engines = admin.get("/tercet/v1/engines").json()
        assert {each["name"] for each in engines if each["reachable"]} == {"prefill-0", "decode-0"}
        refused = httpx.get(f"{url}/tercet/v1/engines")
        assert (refused.status_code, "--admin-listen" in refused.text) == (404, True)
        assert admin.post("/v1/completions", json=body).status_code == 404
        drained = admin.post("/tercet/v1/engines/decode-0/drain", headers={"content-type": "application/json"})
        assert drained.status_code == 200, drained.text
    assert not file.exists()
