"""Spans of real engines by OTLP: one trace from client to vLLM, also when an engine is killed or a request moves."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from tercet.protocol.spans import SpanContext
from tests.otlp import Received, Receiver

from .commands import tercet_process
from .conftest import Fleet, free_port
from .moving import ask, until
from .picker import picking
from .processes import processes_of, send_signal
from .prompts import complete, prompt_of, tokens_of

ROUTER, ENGINE, VLLMS = "tercet-router", "tercet-engine", "llm_request"


def client() -> SpanContext:
    """A client's own place, in a trace that it samples."""
    return SpanContext(secrets.token_hex(16), secrets.token_hex(8), state="vendor=1")


class OneTrace:
    """The spans of one trace, once all are there that a test waits for; not those that a ``killed`` engine had yet."""

    def __init__(self, receiver: Receiver, of: SpanContext, *names: tuple[str, str], killed: str = "") -> None:
        def found(spans: Sequence[Received]) -> list[Received]:
            return [span for span in spans if span.trace_id == of.trace_id]

        def is_there(spans: Sequence[Received]) -> bool:
            of_trace = found(spans)
            by_engines = {span.parent for span in of_trace if span.service == ENGINE}
            return {*names} <= {(span.service, span.name) for span in of_trace} and all(
                span.span_id in by_engines
                for span in of_trace
                if _calls_another(span) and span.attributes.get("tercet.engine") != killed
            )

        self.spans = found(receiver.wait_for(is_there))
        self.by_id = {span.span_id: span for span in self.spans}
        self.root = of

    def named(self, service: str, name: str) -> list[Received]:
        return [span for span in self.spans if (span.service, span.name) == (service, name)]

    def above(self, span: Received) -> list[str]:
        """Names of the spans above it, up to the client's, which it exports itself."""
        names: list[str] = []
        while span.parent != self.root.span_id:
            span = self.by_id[span.parent]
            names.append(span.name)
        return names


def _calls_another(span: Received) -> bool:
    """Whether the one that did its work exports a span of it too: an engine for a router, vLLM for an engine."""
    if span.is_error:
        return False
    return span.name == "start_generate" or (span.service == ROUTER and span.name in ("prep_recv", "remote_send"))


def request_span(trace: OneTrace) -> Received:
    (root,) = trace.named(ROUTER, "POST /v1/completions")
    return root


async def test_a_request_is_one_trace_from_its_client_to_vllm(fleet: Fleet, receiver: Receiver) -> None:
    of = client()
    answer = await complete(fleet.url, prompt_of(300, seed=41), of.headers())
    trace = OneTrace(
        receiver, of, (ROUTER, "POST /v1/completions"), (ENGINE, "prep_recv"), (ENGINE, "remote_send"),
        (ENGINE, "start_generate"), (ENGINE, VLLMS), (ENGINE, "receive"),
    )  # fmt: skip
    root = request_span(trace)
    assert root.parent == of.span_id
    assert root.attributes["gen_ai.usage.output_tokens"] == len(tokens_of(answer))
    for name, engine in (("prep_recv", "decode-0"), ("remote_send", "prefill-0"), ("start_generate", "decode-0")):
        (span,) = trace.named(ENGINE, name)
        assert span.instance == engine
        assert trace.above(span) == [name, "POST /v1/completions"], "the engine's, the router's, the request's"
    (send,) = trace.named(ROUTER, "remote_send")
    assert [trace.by_id[link].name for link in send.links] == ["prep_recv"]
    # Of the KV that the sender's agent told of in its frames.
    (received,) = trace.named(ENGINE, "receive")
    assert received.instance == "decode-0"
    assert trace.above(received) == ["remote_send", "remote_send", "POST /v1/completions"]
    assert trace.by_id[received.parent].instance == "prefill-0", "it is below the sender's, on the other engine"
    assert received.attributes["tercet.bytes"] == send.attributes["tercet.bytes"]
    # vLLM's own: one for each of the two requests that its engines have had.
    of_vllm = {span.instance: trace.above(span)[0] for span in trace.spans if span.name == VLLMS}
    assert of_vllm["decode-0"] == "start_generate"


async def test_a_killed_engine_ends_its_span_in_an_error_and_the_retry_is_linked(
    breakable: Fleet, receiver: Receiver
) -> None:
    of = client()
    headers = {**of.headers(), "x-tercet-program": "disaggregated"}
    asked = asyncio.create_task(
        complete(breakable.url, prompt_of(40, seed=42), headers, max_tokens=400, ignore_eos=True)
    )
    await until(breakable, lambda running: any(each["tokens"] > 8 for each in running))
    _, running = await ask(breakable, "GET", "/sequences")
    killed = "decode-1"  # the one that only the tests that break things use
    if running[0]["engine"] != killed:
        path = f"/sequences/{running[0]['seq_id']}/move"
        status, answer = await ask(breakable, "POST", path, json={"destination": killed})
        assert (status, answer["outcome"]) == (200, "moved"), answer
    send_signal(processes_of(breakable.places[killed].url), signal.SIGKILL)
    assert len(tokens_of(await asked)) == 400
    trace = OneTrace(receiver, of, (ROUTER, "POST /v1/completions"), (ROUTER, "fallback"), killed=killed)
    generated = sorted(trace.named(ROUTER, "start_generate"), key=lambda span: span.began)
    (failed,) = (span for span in generated if span.attributes["tercet.engine"] == killed)
    assert (failed.is_error, failed.attributes["error.type"]) == (True, "engine_unreachable")
    (retry,) = trace.named(ROUTER, "fallback")
    assert [trace.by_id[link].span_id for link in retry.links] == [failed.span_id]
    assert not request_span(trace).is_error
    assert generated[-1].began >= failed.ended
    assert not generated[-1].is_error


async def test_a_move_is_a_span_above_what_both_engines_do_for_it(breakable: Fleet, receiver: Receiver) -> None:
    of = client()
    headers = {**of.headers(), "x-tercet-program": "data_parallel"}
    asked = asyncio.create_task(
        complete(breakable.url, prompt_of(300, seed=43), headers, max_tokens=200, ignore_eos=True)
    )
    await until(breakable, lambda running: any(each["tokens"] > 8 for each in running))
    _, running = await ask(breakable, "GET", "/sequences")
    source = running[0]["engine"]
    destination = next(name for name in breakable.places if name != source)
    status, moved = await ask(
        breakable, "POST", f"/sequences/{running[0]['seq_id']}/move", json={"destination": destination}
    )
    assert status == 200, moved
    assert len(tokens_of(await asked)) == 200
    trace = OneTrace(
        receiver, of, (ROUTER, "move"), (ROUTER, "POST /v1/completions"), (ENGINE, "remote_send"), (ENGINE, "receive")
    )
    (move,) = trace.named(ROUTER, "move")
    assert move.attributes["tercet.move.outcome"] == "moved"
    for name, engine in (("prep_recv", destination), ("remote_send", source)):
        of_engine = [span for span in trace.named(ENGINE, name) if "move" in trace.above(span)]
        assert {span.instance for span in of_engine} == {engine}, name
        assert all(trace.above(span) == [name, "move", "POST /v1/completions"] for span in of_engine)
    received = trace.named(ENGINE, "receive")
    assert {(span.instance, *trace.above(span)[:3]) for span in received} == {
        (destination, "remote_send", "remote_send", "move")
    }
    generated = sorted(trace.named(ENGINE, "start_generate"), key=lambda span: span.began)
    assert [span.instance for span in generated] == [source, destination]


async def test_a_picker_and_a_sidecar_pass_the_trace_on(fleet: Fleet, receiver: Receiver, tmp_path: Path) -> None:
    of = client()
    prefill, decode = (fleet.places[name].url for name in ("prefill-0", "decode-0"))
    prompt = prompt_of(300, seed=44)
    roles = f"--engine={prefill},role=prefill", f"--engine={decode},role=decode"
    log = tmp_path / "sidecar.log"
    url = f"http://127.0.0.1:{(port := free_port())}"
    flags = f"--engine={decode}", f"--port={port}", "--prefill-hosts=127.0.0.1:*"
    async with picking(tmp_path, 2, *roles) as picker:
        picked = await picker.ask({"model": "smollm2", "prompt": prompt}, headers=of.headers())
        with tercet_process(log, f"{url}/health", "sidecar", *flags):
            headers = {**of.headers(), "x-prefiller-host-port": prefill.removeprefix("http://")}
            await complete(url, prompt, headers)
    assert picked.endpoints
    trace = OneTrace(
        receiver, of, ("tercet-picker", "pick"), ("tercet-sidecar", "prefill"), (ENGINE, "remote_send"), (ENGINE, VLLMS)
    )
    (pick,) = trace.named("tercet-picker", "pick")
    assert pick.parent == of.span_id
    (sent,) = trace.named(ENGINE, "remote_send")
    assert (sent.instance, trace.above(sent)[-1]) == ("prefill-0", "prefill")
    assert all(trace.above(span) is not None for span in trace.spans), "each is below the client's"


async def test_a_trace_that_its_client_does_not_sample_is_not_exported(fleet: Fleet, receiver: Receiver) -> None:
    quiet, told = client()._replace(sampled=False), client()
    for of in (quiet, told):
        await complete(fleet.url, prompt_of(60, seed=45), of.headers())
    OneTrace(receiver, told, (ROUTER, "POST /v1/completions"), (ENGINE, "start_generate"))
    assert not [span for span in receiver.spans if span.trace_id == quiet.trace_id]
