"""Engines that are killed or stopped in the middle of a transfer: the other side gets everything back.

These break their engines, so they run on a fleet of their own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tercet.client import HttpEngine
from tercet.protocol import EngineUnreachable, Request, Sent, TercetError, TransferFailed

from .conftest import Fleet, settled, start_fleet
from .prompts import complete, prompt_of, tokens_of

SEND_TIMEOUT = 5


@pytest.fixture
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = start_fleet(
        tmp_path_factory.mktemp("breakable"), "--program-arg", "min_send=1", "--",
        "--max-num-batched-tokens", "128",
    )  # fmt: skip
    yield running
    running.stop()


def processes_of(url: str) -> list[psutil.Process]:
    """The server that listens at `url`, and all its children."""
    port = int(url.rsplit(":", 1)[1])
    listening = [
        process
        for process in psutil.process_iter()
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in _connections(process))
    ]
    assert listening, f"nobody listens at {url}"
    return [listening[0], *listening[0].children(recursive=True)]


def _connections(process: psutil.Process) -> list:
    try:
        return process.net_connections(kind="tcp")
    except psutil.Error:
        return []


def send_signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def request(seed: int = 0) -> Request:
    """One whose prompt is long in computing, and so in being sent, unless it is cached."""
    sampling = {"temperature": 0, "max_tokens": 4}
    return Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(1800, seed=seed)), sampling_params=sampling)


async def sending(prefill: HttpEngine, send: asyncio.Task[Sent]) -> None:
    while not (await prefill.status()).sends:
        assert not send.done(), send
        await asyncio.sleep(0.005)


async def test_killed_sender(breakable: Fleet) -> None:
    async with (
        HttpEngine("prefill-0", breakable.engine_url("prefill")) as prefill,
        HttpEngine("decode-0", breakable.engine_url("decode")) as decode,
    ):
        sequence = request()
        sender, receiver = processes_of(prefill.url), processes_of(decode.url)
        async with decode.prep_recv(sequence) as space:
            send = asyncio.create_task(prefill.remote_send(sequence, space, 0, sample=True))
            await sending(prefill, send)
            send_signal(receiver, signal.SIGSTOP)  # nobody acknowledges now, however late the kill is
            send_signal(sender, signal.SIGKILL)
            with pytest.raises(EngineUnreachable):
                await send
            send_signal(receiver, signal.SIGCONT)
        await settled(decode)
        # The front door serves on: the decode engine can do both.
        answer = await complete(breakable.url, prompt_of(300), {"x-tercet-trace": "1"})
        assert len(tokens_of(answer)) == 12
        assert "decode-0" in {event["engine"] for event in answer["tercet"]["events"]}
        await settled(decode)


async def test_stuck_then_killed_receiver(breakable: Fleet) -> None:
    async with (
        HttpEngine("prefill-0", breakable.engine_url("prefill")) as prefill,
        HttpEngine("decode-0", breakable.engine_url("decode")) as decode,
    ):
        sequence = request()
        receiver = processes_of(decode.url)
        reservation = decode.prep_recv(sequence)
        space = await reservation.__aenter__()
        send = asyncio.create_task(prefill.remote_send(sequence, space, 0, sample=True))
        await sending(prefill, send)
        send_signal(receiver, signal.SIGSTOP)
        # The sender's own work goes on while its peer is stuck.
        alone = Request(seq_id="alone", prompt=tuple(prompt_of(60)), sampling_params={"max_tokens": 3})
        assert [output async for output in prefill.start_generate(alone)]
        with pytest.raises(TransferFailed):
            await send
        await settled(prefill)

        send_signal(receiver, signal.SIGCONT)
        await reservation.__aexit__(None, None, None)
        await settled(decode)

        another = request(seed=1)
        reservation = decode.prep_recv(another)  # its lease ends with the last reference to it
        space = await reservation.__aenter__()
        send = asyncio.create_task(prefill.remote_send(another, space, 0, sample=True))
        await sending(prefill, send)
        send_signal(receiver, signal.SIGKILL)
        with pytest.raises(TercetError):
            await send
        await settled(prefill)
