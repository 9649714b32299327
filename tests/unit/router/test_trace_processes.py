"""A simulated fleet in processes of its own: one trace over router and engines, one id in every log line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.otlp import Receiver, exporter_works

MODEL = "smollm2"
PROFILE = "llama-3.1-8b-h100-tp1"


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def running(log: Path, *command: str, **variables: str) -> Iterator[None]:
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "tercet.cli", *command], stdout=written, stderr=written,
            env={**os.environ, "TERCET_ACCESS_LOG": "1", "TERCET_LOG_FORMAT": "json", **variables},
        )  # fmt: skip
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ask(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    named = {"content-type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    with urllib.request.urlopen(urllib.request.Request(url, data, named), timeout=60) as answer:
        return json.load(answer)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)


@pytest.mark.processes
def test_one_trace_and_one_id_over_router_and_engines(tmp_path: Path) -> None:
    ports = free_ports(3)
    with Receiver() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        if not exporter_works():
            variables = {"OTEL_SDK_DISABLED": "true"}
        engines = [
            ("engine", "--simulate", PROFILE, "--name", name, "--port", str(port), "--model", MODEL)
            for name, port in zip(("p", "d"), ports, strict=False)
        ]
        router = (
            "router", "--engine", f"http://127.0.0.1:{ports[0]},role=prefill,name=p",
            "--engine", f"http://127.0.0.1:{ports[1]},role=decode,name=d", "--port", str(ports[2]),
            "--openai-layer", "small", "--model", MODEL, "--access-log", "--log-format", "json",
        )  # fmt: skip
        url = f"http://127.0.0.1:{ports[2]}"
        with (
            running(tmp_path / "p.log", *engines[0], **variables),
            running(tmp_path / "d.log", *engines[1], **variables),
            running(tmp_path / "router.log", *router, **variables),
        ):
            wait_for(f"{url}/health")
            body = {"model": MODEL, "prompt": list(range(1000)), "max_tokens": 8}
            ask(f"{url}/v1/completions", body, x_request_id="mine-1")
            other = {**body, "prompt": list(range(2000, 3000))}
            made = ask(f"{url}/v1/completions", other)["id"].removeprefix("cmpl-")
            traces = ask(f"{url}/tercet/v1/traces/mine-1")
            if exporter_works():
                receiver.wait_for(
                    lambda spans: (
                        sum(span.service == "tercet-engine" for span in spans) >= 5
                        and sum(span.name.startswith("POST") for span in spans) >= 2
                    )
                )
    assert traces[0]["sequences"][0]["events"]
    for name in ("p", "d", "router"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.log").read_text().splitlines() if line[:1] == "{"]
        about = [line for line in lines if line["logger"] == "tercet.access" and "seq_id" in line]
        about += [line for line in lines if line.get("path") == "/v1/completions"]
        assert about, name
        assert {line["request_id"] for line in about} == {"mine-1", made}, name
        assert exporter_works() is all("trace_id" in line for line in about), name
    if exporter_works():
        _is_one_trace(receiver)


def _is_one_trace(receiver: Receiver) -> None:
    root = next(span for span in receiver.spans if span.attributes.get("tercet.request_id") == "mine-1")
    trace = [span for span in receiver.spans if span.trace_id == root.trace_id]
    by_id = {span.span_id: span for span in trace}
    assert root.parent == ""
    assert all(span.parent in by_id for span in trace if span is not root)
    of_engines = {(span.instance, span.name) for span in trace if span.service == "tercet-engine"}
    assert of_engines == {("d", "prep_recv"), ("p", "remote_send"), ("d", "start_generate")}
    for span in trace:
        if span.service == "tercet-engine":
            assert (by_id[span.parent].service, by_id[span.parent].name) == ("tercet-router", span.name)
    send = next(span for span in trace if span.name == "remote_send" and span.service == "tercet-router")
    assert [by_id[link].name for link in send.links] == ["prep_recv"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
