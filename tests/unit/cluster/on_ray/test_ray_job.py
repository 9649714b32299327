"""`tercet up` as the command of a Ray job: however Ray ends it, answers are finished, and nothing is left."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tercet.cli.up import JOB_VARIABLE
from tests import longest_wait
from tests.long_runs import in_full
from tests.unit.cluster.whole_streams import read_whole

from .ray_cluster import ray_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
SIMULATED = ("--simulate", "llama-3.1-8b-h100-tp1")
SECONDS = 200
TOKENS = 600
REFUSED = 2
MARK = "TERCET_TEST_JOB"


def submission_client(url: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(url)


def marked(mark: Path) -> list[psutil.Process]:
    """Processes that the job with this mark has started, wherever they hang; not those of Ray."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ours = any("tercet" in part for part in process.cmdline())
            if ours and process.environ().get(MARK) == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


until = partial(longest_wait.until, seconds=SECONDS, every=0.05)


def url_in(said: str) -> str:
    found = re.search(r"^ready at (\S+),", said, re.MULTILINE)
    assert found is not None, said
    return found[1]


class Job:
    """A job's command, started and stopped as Ray's supervisor of jobs does it."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.place = place
        self._log = place / "job.log"
        command = " ".join([sys.executable, "-m", "tercet.cli", "up", *arguments])
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                command, shell=True, start_new_session=True, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, JOB_VARIABLE: "{}", MARK: str(place)},
            )  # fmt: skip

    def said(self) -> str:
        return self._log.read_text()

    async def url(self) -> str:
        await until(lambda: "Ctrl-C" in self.said() or self.process.poll() is not None)
        return url_in(self.said())

    def stop(self, wait: float) -> None:
        root = psutil.Process(self.process.pid)
        processes = [root, *root.children(recursive=True)]
        for each in processes:
            each.send_signal(signal.SIGTERM)
        for each in psutil.wait_procs(processes, timeout=wait)[1]:
            each.kill()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        for process in marked(job.place):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        job.process.wait()


@pytest.mark.parametrize(
    "wait",
    [pytest.param(0.0, id="killed"), pytest.param(float(SECONDS), id="in-time", marks=in_full("killed at once"))],
)
async def test_the_end_of_a_job_cuts_no_answer(tmp_path: Path, jobs: list[Job], wait: float) -> None:
    job = Job(tmp_path, *SIMULATED, "--decode", "0", "--port", "0", "--log-dir", str(tmp_path))
    jobs.append(job)
    url, begun = await job.url(), asyncio.Event()
    async with aiohttp.ClientSession() as session:
        reading = asyncio.create_task(read_whole(session, url, "One two three.", TOKENS, begun))
        await begun.wait()
        await asyncio.to_thread(job.stop, wait)
        await reading
    await until(lambda: not marked(tmp_path))
    assert "\nstopping\n" in job.said()


def test_a_job_ends_as_its_fleet_does(tmp_path: Path, jobs: list[Job]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = Job(tmp_path, *SIMULATED, "--port", str(taken.getsockname()[1]), "--log-dir", str(tmp_path))
        jobs.append(job)
        assert job.process.wait(SECONDS) == REFUSED, job.said()
    assert "cannot listen" in job.said()


@in_full("the command is stopped and killed as Ray does")
@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="needs requirements/ray-jobs.txt")
async def test_a_fleet_on_ray_as_a_job(tmp_path: Path) -> None:
    with ray_cluster(nodes=1, dashboard=True) as cluster:
        client = await asyncio.to_thread(submission_client, cluster.dashboard)
        for _ in range(2):  # what the first one had left would be in the way of the second
            await until_stopped(client, tmp_path)


async def until_stopped(client: Any, mark: Path) -> None:
    """Submit a job, stop it under a stream, and see its fleet end."""
    command = [sys.executable, "-m", "tercet.cli", "up", "--on", "ray", *SIMULATED, "--port", "0"]
    job = await asyncio.to_thread(
        client.submit_job,
        entrypoint=" ".join([*command, "--fleet-name", "job"]),
        runtime_env={"env_vars": {MARK: str(mark), "TERCET_SECRET": "s"}},
    )

    def said() -> str:
        return client.get_job_logs(job)

    await until(lambda: "Ctrl-C" in said() or client.get_job_status(job).is_terminal())
    url, begun = url_in(said()), asyncio.Event()
    async with aiohttp.ClientSession() as session:
        reading = asyncio.create_task(read_whole(session, url, "One two three.", TOKENS, begun))
        await begun.wait()
        client.stop_job(job)
        await until(lambda: client.get_job_status(job).is_terminal())
        await reading
    assert client.get_job_status(job) == "STOPPED"
    await until(lambda: not marked(mark))
    assert "\nstopping\n" in said()
