"""The cost of spans in the router: CPU per streamed token without OpenTelemetry, and with all requests sampled.

    python benchmarks/tracing.py [--seconds S] [--rounds N] [--tokens N] [--result-filename FILE]
    python benchmarks/tracing.py --span [--rounds N]

Two routers with one token source, as in front_door.py, are measured in turn: one without spans, and one that sends
spans to an OTLP receiver in a separate process, which drops them. The CPU time (user and system) of the router's
process is divided by the number of tokens that clients received. The last line has the median of each router, and the
overhead.

With ``--span`` one span is measured, in this process: the CPU time of all threads for a span with three attributes
below a caller's, by OpenTelemetry's API and by Tercet's, in turns: without an exporter, in a trace that is not sampled,
and in one that is, up to an exporter that drops it. The exporter's own work, the same for both, is not part of it.
"""

from __future__ import annotations

import argparse
import http.server
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from front_door import MODEL_NAME, Row, free_port, measure, process, write_rows

STREAMS = 32
SPANS = 1000  # of one measurement; less than the SDK queues before it drops some
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ATTRIBUTES = {"tercet.engine": "decode-0", "tercet.seq_id": "cmpl-8f2c-0", "gen_ai.usage.input_tokens": 1000}


class Sink(http.server.BaseHTTPRequestHandler):
    """An OTLP receiver that reads and drops all data."""

    def do_POST(self) -> None:
        """Accept an export and drop it."""
        self.rfile.read(int(self.headers["content-length"]))
        self._answer()

    def do_GET(self) -> None:
        """Answer a health check."""
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def run(args: argparse.Namespace) -> list[Row]:
    """Measure all rounds, print the medians, and return the measurements."""
    from tercet.cluster.model import resolve_model

    model = resolve_model("smollm2", lambda _: None)
    source, sink, *ports = (free_port() for _ in range(4))
    rows: list[Row] = []
    with ExitStack() as stack:
        token_source = str(Path(__file__).with_name("token_source.py"))
        stack.enter_context(process(token_source, "source", str(source), port=source, path="/tercet/v1/status"))
        stack.enter_context(process(__file__, "--sink", str(sink), port=sink))
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink}", "OTEL_TRACES_SAMPLER": "always_on"}
        routers: list[tuple[str, int, int]] = []
        for name, port, variables in (("without", ports[0], {}), ("all sampled", ports[1], told)):
            command = (
                "-m", "tercet.cli", "router", "--engine", f"http://127.0.0.1:{source}", "--program", "data_parallel",
                "--port", str(port), "--model", model, "--served-model-name", MODEL_NAME, "--log-level", "warning",
            )  # fmt: skip
            routers.append((name, port, stack.enter_context(process(*command, port=port, **variables))))
        for _ in range(args.rounds):
            for name, port, pid in routers:
                rows.append(measure(name, f"{STREAMS} streams", port, [pid], args.seconds, args.tokens, STREAMS))
    medians = [statistics.median(row.us_per_token for row in rows if row.server == name) for name, _, _ in routers]
    without, sampled = medians
    print(f"median us/token: {without:.1f} without, {sampled:.1f} with spans: {100 * (sampled / without - 1):+.1f}%")
    return rows


@contextmanager
def spans_of_otel(sampler: str) -> Generator[Callable[[], None]]:
    """Yield what makes and exports ``SPANS`` spans by OpenTelemetry's API; without a ``sampler`` nothing exports."""
    from opentelemetry import context, trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    provider: Any = trace.NoOpTracerProvider()
    if sampler:
        provider = TracerProvider(shutdown_on_exit=False)  # reads OTEL_TRACES_SAMPLER
        provider.add_span_processor(BatchSpanProcessor(dropping()))
    tracer = provider.get_tracer("tercet")
    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": CALLER}))

    def spans() -> None:
        for _ in range(SPANS):
            with tracer.start_as_current_span("start_generate", kind=trace.SpanKind.SERVER, attributes=ATTRIBUTES):
                pass
        if sampler:
            provider.force_flush()

    try:
        yield spans
    finally:
        context.detach(token)
        if sampler:
            provider.shutdown()


@contextmanager
def spans_of_tercet(sampler: str) -> Generator[Callable[[], None]]:
    """Yield the same by Tercet's spans."""
    from tercet.protocol import spans as tercet
    from tercet.wire.otel import OtelSpans

    sink = tercet.process.sink = OtelSpans("benchmark", {}, dropping()) if sampler else None

    def spans() -> None:
        for _ in range(SPANS):
            with tercet.span_of("start_generate", {**ATTRIBUTES}, "server"):
                pass
        if sink is not None:
            sink._batches.force_flush()

    try:
        with tercet.working_in(tercet.read_traceparent(CALLER)):
            yield spans
    finally:
        tercet.process.sink = None
        if sink is not None:
            sink.close()


def dropping() -> Any:
    """Return an exporter that drops all spans."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Dropping(SpanExporter):
        """An exporter that drops what it gets."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    return Dropping()


def run_spans(rounds: int) -> None:
    """Measure single spans, and print a line for each state."""
    for name, sampler in (("no exporter", ""), ("not sampled", "always_off"), ("sampled", "always_on")):
        os.environ["OTEL_TRACES_SAMPLER"] = sampler or "always_on"
        took: dict[str, list[float]] = {"OpenTelemetry": [], "Tercet": []}
        with spans_of_otel(sampler) as theirs, spans_of_tercet(sampler) as ours:
            for _ in range(rounds):
                for api, spans in (("OpenTelemetry", theirs), ("Tercet", ours)):
                    began = time.process_time()
                    spans()
                    took[api].append((time.process_time() - began) * 1e6 / SPANS)
        said = ", ".join(f"{api} {statistics.median(each):.1f} ({min(each):.1f})" for api, each in took.items())
        print(f"{name:12} us of CPU per span, median (least) of {rounds}: {said}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sink", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--span", action="store_true", help="measure one span, by OpenTelemetry's API and by Tercet's")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each router")
    parser.add_argument("--result-filename", type=Path, help="JSON file for the measurements")
    args = parser.parse_args()
    if args.sink is not None:
        http.server.ThreadingHTTPServer(("127.0.0.1", args.sink), Sink).serve_forever()
        return
    if args.span:
        run_spans(args.rounds)
        return
    rows = run(args)
    if args.result_filename is not None:
        write_rows(args.result_filename, rows)


if __name__ == "__main__":
    main()
