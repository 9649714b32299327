"""What reaches vLLM's publisher of KV events: a request for a replay does, a long message does not."""

from __future__ import annotations

import logging

import pytest
import zmq
from vllm.distributed.kv_events import ZmqEventPublisher

from tercet.cluster.ports import free_ports
from tercet.vllm_plugin.core.core_methods import LONGEST_REQUEST, bound_replay_requests


def test_long_messages_are_not_taken(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZmqEventPublisher, "_socket_setup", ZmqEventPublisher._socket_setup)  # back as it was, later
    bound_replay_requests()
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    wild = [address.replace("127.0.0.1", "*") for address in (events, replay)]
    publisher = ZmqEventPublisher(0, endpoint=wild[0], replay_endpoint=wild[1])
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, context.socket(zmq.DEALER) as asking:
            stranger.linger = asking.linger = 0
            stranger.connect(replay)
            asking.connect(replay)
            with caplog.at_level(logging.WARNING):
                logging.getLogger("vllm").propagate = True
                stranger.send_multipart([b"", b"x" * (LONGEST_REQUEST + 1)])
                asking.send_multipart([b"", (0).to_bytes(8, "big")])
                assert asking.poll(20_000)
                assert asking.recv_multipart()
            assert not any("xxx" in record.getMessage() for record in caplog.records)
    finally:
        publisher.shutdown()
