"""The edge of an engine: what it refuses, by the field's name; whose reports it believes; and the line that its access
log has of a generation that the scheduler ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from tercet.engine.agents import AgentReports
from tercet.engine.edge import check_send
from tercet.engine.interface import ModelLimits
from tercet.engine.verbs import DecodingSequence
from tercet.logs import LoggedGeneration, lines_of_request
from tercet.protocol import BadRequest, KVAddrInfo, KVLayout, LayoutMismatch, Output, RankAddress, Usage
from tercet.protocol.spans import Span, SpanContext, process
from tercet.protocol.wire import RemoteSendCall
from tercet.transport import LeaseFilled, ReceiveDone, ReceiveEnd, SendDone
from tercet.transport.agent.agent import Reporter
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.transport.models import whose

LIMITS = ModelLimits(vocab_size=100, max_model_len=10)
LAYOUT = KVLayout(
    model="m", dtype="float32", num_layers=2, num_kv_heads=2, head_size=8, block_size=16, block_bytes=2048, tp_size=1,
    packing="cpu-vec", splits_by_head=True, splits_by_token=True,
)  # fmt: skip
INFO = KVAddrInfo("f" * 32, "decode-0", 16, 48, "tcp", (RankAddress(0, ("tcp://127.0.0.1:9000",)),), LAYOUT)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [([], "is empty"), ([100], "outside the vocabulary of 100"), ([1] * 11, "11 tokens exceed the model's maximum")],
)
def test_prompts_that_the_model_cannot_take(tokens: list[int], says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        LIMITS.check_prompt(tokens)
    assert caught.value.param == "prompt"


def test_a_prompt_may_fill_the_model_and_use_every_token() -> None:
    LIMITS.check_prompt([99] * 10)


@pytest.mark.parametrize("output", [[100], [1] * 5])
def test_output_that_the_model_cannot_have_made(output: list[int]) -> None:
    with pytest.raises(BadRequest) as caught:
        LIMITS.check_output([1] * 5, output)
    assert caught.value.param == "output"


def test_output_may_leave_room_for_one_token() -> None:
    LIMITS.check_output([1] * 5, [1] * 4)
    LIMITS.check_output([1] * 10, [])


def check(begin: int = 16, end: int = 48, length: int = 48, sample: bool = False, **info: Any) -> None:
    call = RemoteSendCall(
        prompt=[1] * length, seq_id="s", kv_addr_info=msgspec.structs.replace(INFO, **info), begin=begin, end=end,
        sample=sample,
    )  # fmt: skip
    check_send(call, begin, end, length, LAYOUT)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"begin": 15}, "begin"),
        ({"end": 49, "length": 60}, "end"),
        ({"sample": True, "length": 50}, "sample"),
        ({"lease": "F" * 32}, "kv_addr_info"),
        ({"lease": ""}, "kv_addr_info"),
        ({"transport": "pigeon"}, "kv_addr_info"),
        ({"ranks": ()}, "kv_addr_info"),
        ({"ranks": (RankAddress(1, ("tcp://127.0.0.1:1",)),)}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ("tcp://127.0.0.1:1",)), RankAddress(0, ("tcp://127.0.0.1:1",)))}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ()),)}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ("tcp://127.0.0.1:65536",)),)}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ("ipc:///tmp/somewhere",)),)}, "kv_addr_info"),
    ],
    ids=str,
)
def test_sends_that_no_reservation_has_a_place_for(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(**wrong)
    assert caught.value.param == param


def test_sends_to_another_model_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="model"):
        check(layout=msgspec.structs.replace(LAYOUT, model="other"))


def ranks(count: int) -> tuple[RankAddress, ...]:
    return tuple(RankAddress(number, (f"tcp://127.0.0.1:{9000 + number}",)) for number in range(count))


@pytest.mark.parametrize("stages", [((1,),), ((1, 1), (0, 1)), ((1,), (1, 0)), ((), ())], ids=str)
def test_stages_that_no_engine_has(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises((BadRequest, LayoutMismatch)):
        check(layout=msgspec.structs.replace(LAYOUT, stages=stages), ranks=ranks(len(stages) - (len(stages) == 1)))


def test_each_stage_has_ranks() -> None:
    staged = msgspec.structs.replace(LAYOUT, stages=((1,), (1,)))
    check(layout=staged, ranks=ranks(2))
    for count in (1, 3):
        with pytest.raises(BadRequest, match="each rank of the layout once"):
            check(layout=staged, ranks=ranks(count))


def test_layers_in_another_order_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="plane_order"):
        check(layout=msgspec.structs.replace(LAYOUT, plane_order="another"))


def test_a_send_that_fits_is_taken() -> None:
    check()
    check(sample=True)
    check(begin=20, end=30)


@pytest.mark.parametrize("key", [b"", b"0" * 32, b"key"])
async def test_a_process_that_does_not_know_the_inbox_s_key_reports_nothing(key: bytes) -> None:
    filled: list[LeaseFilled] = []
    reports, reporter = AgentReports(1, filled.append), Reporter()
    stranger: Any = zmq.asyncio.Context.instance().socket(zmq.PUSH)
    stranger.connect(reports.address.partition("#")[0])
    try:
        with reports.sending() as sending:
            forged = msgspec.msgpack.encode(["SendDone", SendDone(sending.send_id, 0, 666, 1)])
            for frames in ([key, forged], [forged], [forged, key], [key, forged, forged]):
                await stranger.send_multipart(frames)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await sending.wait()
            assert not sending.reports
        with reports.sending() as sending:
            reporter.report(reports.address, LeaseFilled("f" * 32, 0, whose(16)))
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            async with asyncio.timeout(LONGEST_WAIT_S):
                assert (await sending.wait()).bytes == 5
        assert filled == [LeaseFilled("f" * 32, 0, whose(16))]
    finally:
        reports._task.cancel()
        reports._socket.close()
        stranger.close(linger=0)
        reporter.close()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
async def test_agents_on_other_machines_report_to_the_address_that_they_reach(host: str) -> None:
    reports, reporter = AgentReports(1, print, host), Reporter()
    try:
        with reports.sending() as sending:
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            async with asyncio.timeout(LONGEST_WAIT_S):
                assert (await sending.wait()).bytes == 5
    finally:
        reports._task.cancel()
        reports._socket.close()
        reporter.close()


class Sink:
    """Keeps what it is told, below its caller."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def enters(self, caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext:
        assert caller is not None
        return caller.child()

    def take(self, spans: Iterable[Span]) -> None:
        self.spans += spans


SENDER = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


async def test_a_receive_is_a_span_below_its_sender_s(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, (reports, reporter) = Sink(), (AgentReports(1, print), Reporter())
    lost = ReceiveEnd("f" * 32, SENDER.traceparent, 5, 9, 64, "transfer_failed", "gone")
    try:
        with reports.sending() as sending:
            reporter.report(reports.address, ReceiveDone(0, ReceiveEnd("f" * 32, SENDER.traceparent, 3, 4, 1)))
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            await asyncio.wait_for(sending.wait(), LONGEST_WAIT_S)  # nobody wants spans
            monkeypatch.setattr(process, "sink", sink)
        with reports.sending() as sending:
            reporter.report(reports.address, ReceiveDone(0, msgspec.structs.replace(lost, traceparent="nonsense")))
            reporter.report(reports.address, ReceiveDone(1, lost))
            reporter.report(reports.address, SendDone(sending.send_id, 0, 5, 1, "tcp"))
            await asyncio.wait_for(sending.wait(), LONGEST_WAIT_S)
    finally:
        reports._task.cancel()
        reports._socket.close()
        reporter.close()
    (span,) = sink.spans
    assert (span.name, span.parent, span.context.trace_id) == ("receive", SENDER.span_id, SENDER.trace_id)
    assert (span.began_ns, span.ended_ns, span.error, span.reason) == (5, 9, "transfer_failed", "gone")
    assert span.attributes == {"tercet.rank": 1, "tercet.bytes": 64}


def test_a_generation_is_logged_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet.access")
    request: Any = type("Request", (), {"num_cached": 0})()
    with lines_of_request("mine"):
        done, broken, left = (
            DecodingSequence(name, 1, request, [1, 2, 3], lambda _: Usage(), lambda _: None, "small")
            for name in ("a", "b", "c")
        )
    done.counted(Output((5, 6)))
    done.counted(Output((7,), "stop"))
    done.end()
    done.end()
    with pytest.raises(BadRequest), broken.ended():
        raise BadRequest("no", "x")
    left.counted(Output((5,)))
    left.end()
    found: list[dict[str, Any]] = [getattr(record, "tercet_fields") for record in caplog.records]  # noqa: B009
    assert [(each["seq_id"], each["status"], each["prompt_tokens"], each["output_tokens"]) for each in found] == [
        ("a", 200, 3, 3), ("b", 400, 3, 0), ("c", 0, 3, 1),
    ]  # fmt: skip
    assert {(each["request_id"], each["model"]) for each in found} == {("mine", "small")}
    LoggedGeneration("d", "small", 1).over(200, 2)
    assert caplog.messages[-1].endswith("model small, 1 + 2 tokens")
