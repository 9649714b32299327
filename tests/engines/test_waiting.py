"""vLLM's own message queue with Tercet's way of waiting: every message arrives, and soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

MESSAGES = 200


@pytest.fixture
def queue() -> Iterator[tuple[object, object]]:
    """A writer and a reader of one queue, whose reader sleeps between messages."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

    from tercet.vllm_plugin.hooks import hooks_of
    from tercet.vllm_plugin.worker.model_runner import let_queue_readers_sleep

    begin, wait = SpinCondition.__init__, SpinCondition.wait
    let_queue_readers_sleep()
    assert not any(hook.check() for hook in hooks_of("engine"))  # nor where the hooks are installed
    try:
        writer = MessageQueue(1, 1)
        yield writer, MessageQueue.create_from_handle(writer.export_handle(), 0)
    finally:
        SpinCondition.__init__, SpinCondition.wait = begin, wait  # type: ignore[method-assign]


def test_a_reader_sleeps_and_misses_no_message(queue: tuple[object, object]) -> None:
    writer, reader = queue
    arrived: list[tuple[int, float]] = []
    shares: list[float] = []

    def read() -> None:
        reader.wait_until_ready()  # type: ignore[attr-defined]
        begun, used = time.monotonic(), time.thread_time()
        for _ in range(MESSAGES):
            message = reader.dequeue(timeout=60)  # type: ignore[attr-defined]
            arrived.append((message[0], time.monotonic() - message[1]))
        shares.append((time.thread_time() - used) / (time.monotonic() - begun))

    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()  # type: ignore[attr-defined]
    for index in range(MESSAGES):
        time.sleep(0.005 * (index % 3))
        writer.enqueue((index, time.monotonic()))  # type: ignore[attr-defined]
    thread.join(60)
    assert [index for index, _ in arrived] == list(range(MESSAGES))
    # Looking all the time takes a whole core, unless others want it.
    assert shares[0] < 0.5
    # A missed notice costs vLLM's reader up to five seconds.
    assert sorted(late for _, late in arrived)[-MESSAGES // 20] < 1
