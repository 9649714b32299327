"""A simulated fleet in processes of its own: one trace over router and engines, one id in every log line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.otlp import Receiver
from tests.simulated_processes import MODEL, ask, fleet


@pytest.mark.processes
@pytest.mark.usefixtures("forked")
def test_one_trace_and_one_id_over_router_and_engines(tmp_path: Path) -> None:
    with Receiver() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with fleet(tmp_path, "--access-log", "--log-format", "json", **variables) as (url, _):
            body = {"model": MODEL, "prompt": list(range(1000)), "max_tokens": 8}
            ask(f"{url}/v1/completions", body, x_request_id="mine-1")
            other = {**body, "prompt": list(range(2000, 3000))}
            made = ask(f"{url}/v1/completions", other)["id"].removeprefix("cmpl-")
            traces = ask(f"{url}/tercet/v1/traces/mine-1")
            receiver.wait_for(
                lambda spans: (
                    sum(span.service == "tercet-engine" for span in spans) >= 5
                    and sum(span.name.startswith("POST") for span in spans) >= 2
                )
            )
    assert traces[0]["sequences"][0]["events"]
    for names in (("p",), ("d", "e"), ("router",)):
        text = "".join((tmp_path / f"{name}.log").read_text() for name in names)
        lines = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        about = [line for line in lines if line["logger"] == "tercet.access" and "seq_id" in line]
        about += [line for line in lines if line.get("path") == "/v1/completions"]
        assert about, names
        assert {line["request_id"] for line in about} == {"mine-1", made}, names
        assert all("trace_id" in line for line in about), names
    _is_one_trace(receiver)


def _is_one_trace(receiver: Receiver) -> None:
    root = next(span for span in receiver.spans if span.attributes.get("tercet.request_id") == "mine-1")
    trace = [span for span in receiver.spans if span.trace_id == root.trace_id]
    by_id = {span.span_id: span for span in trace}
    assert root.parent == ""
    assert all(span.parent in by_id for span in trace if span is not root)
    of_engines = [(span.instance, span.name) for span in trace if span.service == "tercet-engine"]
    decoding = next(engine for engine, name in of_engines if name == "prep_recv")
    assert {*of_engines} == {(decoding, "prep_recv"), ("p", "remote_send"), (decoding, "start_generate")}
    for span in trace:
        if span.service == "tercet-engine":
            assert (by_id[span.parent].service, by_id[span.parent].name) == ("tercet-router", span.name)
    send = next(span for span in trace if span.name == "remote_send" and span.service == "tercet-router")
    assert [by_id[link].name for link in send.links] == ["prep_recv"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
