"""A receiver of OTLP over HTTP for tests: it keeps every span that it is sent."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.servers import SHUTDOWN_POLL_S


class Received(NamedTuple):
    """One span; ids in hexadecimal, times in seconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    began: float
    ended: float
    attributes: dict[str, Any]
    links: list[str]
    is_error: bool


class Receiver:
    """``url`` is what ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set to."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.spans += spans_in(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(SHUTDOWN_POLL_S,), daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def wait_for(self, is_there: Callable[[list[Received]], object], seconds: float = 60.0) -> list[Received]:
        """The spans, once they are what a test waits for."""
        deadline = time.monotonic() + seconds
        while not is_there(self.spans):
            assert time.monotonic() < deadline, [(each.service, each.name) for each in self.spans]
            time.sleep(0.05)
        return self.spans


def spans_in(body: bytes) -> Iterator[Received]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest()
    message.ParseFromString(body)
    for resource in message.resource_spans:
        of = {each.key: each.value.string_value for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    of["service.name"], of.get("service.instance.id", ""), span.name, span.trace_id.hex(),
                    span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    {each.key: _value(each.value) for each in span.attributes},
                    [each.span_id.hex() for each in span.links], span.status.code == 2,
                )  # fmt: skip


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
