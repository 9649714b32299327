"""Engines that are killed or stopped in the middle of a transfer: the other side gets everything back."""

from __future__ import annotations

import asyncio
import signal
import uuid

import pytest

from tercet.protocol import EngineUnreachable, Request, Sent, TercetError, TransferFailed
from tercet.wire.client import HttpEngine

from .conftest import Fleet, settled
from .processes import processes_of, send_signal
from .prompts import complete, prompt_of, tokens_of

pytestmark = pytest.mark.verifies("failures of engines")


def request(seed: int = 0) -> Request:
    """One whose prompt is long in computing, and so in being sent: it is in no cache."""
    return Request(
        seq_id=uuid.uuid4().hex,
        prompt=tuple(prompt_of(1800, seed=seed)),
        sampling_params={"temperature": 0, "max_tokens": 4},
        cache_salt=uuid.uuid4().hex,
    )


async def sending(prefill: HttpEngine, send: asyncio.Task[Sent]) -> None:
    while not (await prefill.status()).sends:
        assert not send.done(), send
        await asyncio.sleep(0.005)


async def test_killed_sender(breakable: Fleet) -> None:
    async with (
        HttpEngine("decode-1", breakable.places["decode-1"].url) as prefill,
        HttpEngine("decode-0", breakable.places["decode-0"].url) as decode,
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
        # The router serves on.
        answer = await complete(breakable.url, prompt_of(300), {"x-tercet-trace": "1"})
        assert len(tokens_of(answer)) == 12
        assert "decode-0" in {event["engine"] for event in answer["tercet"]["events"]}
        await settled(decode)


async def test_stuck_then_killed_receiver(breakable: Fleet) -> None:
    async with (
        HttpEngine("prefill-0", breakable.places["prefill-0"].url) as prefill,
        HttpEngine("decode-0", breakable.places["decode-0"].url) as decode,
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
