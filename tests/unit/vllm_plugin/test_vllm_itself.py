"""vLLM itself: what differs between its versions, for how long its processes look for messages before they sleep, and
what a core says of pauses.
"""

from __future__ import annotations

import logging

import pytest
import zmq
from vllm import envs
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.v1.core.sched.interface import PauseState

from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest
from tercet.settings.process_settings import spin_seconds
from tercet.vllm_plugin import differences
from tercet.vllm_plugin.core.core_methods import LONGEST_REQUEST, bound_replay_requests
from tercet.vllm_plugin.differences import DIFFERENCES, Difference
from tercet.vllm_plugin.hooks import MINORS, Has, vllm_version
from tercet.wire.client import http_engine

from .tiny_engine import TinyEngine


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


@pytest.mark.parametrize(
    ("state", "paused"), [(PauseState.UNPAUSED, ""), (PauseState.PAUSED_NEW, "new"), (PauseState.PAUSED_ALL, "all")]
)
def test_the_status_tells_what_is_paused(engine: TinyEngine, state: PauseState, paused: str) -> None:
    engine.core.scheduler.set_pause_state(state)
    assert engine.status()["paused"] == paused
    engine.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.status()["paused"] == ""


def test_a_sleeping_engine_is_paused(engine: TinyEngine) -> None:
    engine.core.model_executor.is_sleeping = True
    assert engine.status()["paused"] == "all"


INSTALLED = next(minor for minor in MINORS if vllm_version().startswith(f"{minor}."))


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.what)
def test_a_difference_is_in_the_versions_up_to_its_last(difference: Difference) -> None:
    assert difference.is_here == (MINORS.index(INSTALLED) <= MINORS.index(difference.last))


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.what)
def test_it_ends_within_the_supported_versions(difference: Difference) -> None:
    assert difference.last in MINORS[:-1], f"delete the branches for this: {difference.what}"


def test_all_are_listed() -> None:
    declared = [each for each in vars(differences).values() if isinstance(each, Difference)]
    assert declared == list(DIFFERENCES)


def test_it_is_told_by_the_code_of_vllm() -> None:
    assert Difference("", "0.32", Has("json:JSONDecoder", "shape")).is_here
    assert not Difference("", "0.32", Has("json:JSONDecoder", "decode")).is_here


def test_the_module_of_options_is_the_installed_ones() -> None:
    assert callable(differences.cli_args().make_arg_parser)
