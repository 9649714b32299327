"""`tercet up` with a warm parent of its own, and without: what is forked and restarted, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tercet.settings.process_settings import COLD, WARM_PARENT_VARIABLE
from tests.long_runs import in_full
from tests.longest_wait import wait_until
from tests.small_llama import small_llama

from .conftest import START_SECONDS, answers, free_port
from .processes import processes_of
from .prompts import alone, prompt_of

ALONE = "starting without shared imports"


@contextmanager
def one_engine(tmp: Path, warm: str | None) -> Generator[str]:
    """A router over one engine; all of it has ended without a trace afterwards."""
    port, sockets = free_port(), Path(tempfile.mkdtemp(prefix="starts-"))
    command = [
        sys.executable, "-m", "tercet.cli", "up", "--model", str(small_llama()), "--served-model-name", "smollm2",
        "--both", "1", "--prefill", "0", "--decode", "0", "--port", str(port), "--dtype", "float32",
        "--log-dir", str(tmp), "--program", "data_parallel", "--", "--max-model-len", "2048",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != WARM_PARENT_VARIABLE}
    environment["TMPDIR"] = str(sockets)
    if warm is not None:
        environment[WARM_PARENT_VARIABLE] = warm
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or answers(f"{url}/health"))
        assert process.poll() is None
        yield url
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
        until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
        assert [*sockets.glob("tercet-warm-*")] == []
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(sockets, ignore_errors=True)


until = partial(wait_until, seconds=START_SECONDS, every=0.1)


def warm_parent_of(url: str, tmp: Path) -> psutil.Process | None:
    """The process that has forked the engine's API server and the router, if one has."""
    parents = {psutil.Process(processes_of(each)[0].pid).parent() for each in (url, engine_url(tmp))}
    (found,) = parents if len(parents) == 1 else (None,)
    return found if found is not None and "tercet.cluster.child_process" in " ".join(found.cmdline()) else None


def engine_url(tmp: Path) -> str:
    """By the router's settings file."""
    text = (tmp / "router.json").read_text()
    return "http://127.0.0.1:" + text.partition('"url": "http://127.0.0.1:')[2].partition('"')[0]


async def test_engine_and_router_are_forked_and_so_is_an_engine_that_starts_again(tmp_path: Path) -> None:
    with one_engine(tmp_path, None) as url:
        warm = warm_parent_of(url, tmp_path)
        assert warm is not None
        expected = await alone(url, prompt_of(100))
        processes_of(engine_url(tmp_path))[0].kill()
        until(lambda: (tmp_path / "engine-0-2.log").exists() and answers(f"{engine_url(tmp_path)}/health"))
        assert warm_parent_of(url, tmp_path) == warm
        until(lambda: answers(f"{url}/health"))
        assert await alone(url, prompt_of(100)) == expected

    assert ALONE not in "".join(
        (tmp_path / name).read_text() for name in ("engine-0.log", "engine-0-2.log", "router.log")
    )


@in_full("tests/unit/cluster/test_forked_commands.py")
async def test_what_was_forked_outlives_the_warm_parent(tmp_path: Path) -> None:
    with one_engine(tmp_path, None) as url:
        warm = warm_parent_of(url, tmp_path)
        assert warm is not None
        expected = await alone(url, prompt_of(100))
        warm.send_signal(signal.SIGKILL)
        until(lambda: not warm.is_running() or warm.status() == psutil.STATUS_ZOMBIE)
        assert await alone(url, prompt_of(100)) == expected, "what was forked goes on"
        processes_of(engine_url(tmp_path))[0].kill()
        until(lambda: (tmp_path / "engine-0-2.log").exists() and answers(f"{engine_url(tmp_path)}/health"))
        assert ALONE in (tmp_path / "engine-0-2.log").read_text()
        until(lambda: answers(f"{url}/health"))
        assert await alone(url, prompt_of(100)) == expected, "what imports by itself computes the same"


@in_full("tests/unit/cluster/test_forked_commands.py")
async def test_without_a_warm_parent_each_imports(tmp_path: Path) -> None:
    with one_engine(tmp_path, COLD) as url:
        assert warm_parent_of(url, tmp_path) is None
        assert not (tmp_path / "imports.log").exists()
        assert len(await alone(url, prompt_of(100))) == 12


@pytest.mark.parametrize("differs", ["HF_HUB_OFFLINE"])
def test_what_is_read_at_import_is_not_taken_from_the_warm_parent(differs: str, tmp_path: Path) -> None:
    """Another value than the warm parent has: the command is run instead, and names it."""
    from tests.warm import start_guarded

    command = [sys.executable, "-m", "tercet.cli", "--version"]
    with (tmp_path / "out.log").open("wb") as log:
        process = start_guarded(command, {**os.environ, differs: "0"}, log)
    assert process.wait(START_SECONDS) == 0
    assert f"{ALONE}: the process needs other values of {differs}" in (tmp_path / "out.log").read_text()
    assert differs in (tmp_path / "out.log").read_text()
