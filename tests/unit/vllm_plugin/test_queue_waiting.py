"""For how long vLLM's processes look for messages before they sleep, and that none is missed."""

from __future__ import annotations

import logging

import pytest
import zmq
from vllm import envs
from vllm.distributed.kv_events import ZmqEventPublisher

from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest
from tercet.settings.process_settings import spin_seconds
from tercet.vllm_plugin.core.core_methods import LONGEST_REQUEST, bound_replay_requests
from tercet.wire.client import http_engine


def test_engines_on_a_cpu_sleep_at_once_and_others_as_vllm_does() -> None:
    assert spin_seconds({}, on_cpu=True) == 0
    assert spin_seconds({}, on_cpu=False) is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_variable_decides(on_cpu: bool) -> None:
    assert spin_seconds({"TERCET_SPIN_SECONDS": "0.5"}, on_cpu) == 0.5


@pytest.mark.parametrize("given", ["", "soon", "-1", "nan", "inf"])
def test_what_is_no_duration_is_refused_by_name(given: str) -> None:
    with pytest.raises(BadRequest, match="TERCET_SPIN_SECONDS"):
        spin_seconds({"TERCET_SPIN_SECONDS": given}, on_cpu=True)


# How long vLLM's server keeps a connection that nobody uses, against how long Tercet's clients do.


def test_connections_are_given_up_before_vllm_closes_them() -> None:
    assert http_engine.KEEPALIVE_SECONDS < envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE


# What reaches vLLM's publisher of KV events: a request for a replay does, a long message does not.


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
