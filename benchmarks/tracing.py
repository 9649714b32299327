"""The cost of spans in the router: CPU per streamed token without OpenTelemetry, and with all requests sampled.

    python benchmarks/tracing.py [--seconds S] [--rounds N] [--tokens N] [--result-filename FILE]

Two routers with one token source, as in front_door.py, are measured in turn: one without spans, and one that sends
spans to an OTLP receiver in a separate process, which drops them. The CPU time (user and system) of the router's
process is divided by the number of tokens that clients received. The last line has the median of each router, and the
overhead.
"""

from __future__ import annotations

import argparse
import http.server
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from front_door import MODEL_NAME, Row, free_port, measure, process, write_rows

STREAMS = 32


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


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sink", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each router")
    parser.add_argument("--result-filename", type=Path, help="JSON file for the measurements")
    args = parser.parse_args()
    if args.sink is not None:
        http.server.ThreadingHTTPServer(("127.0.0.1", args.sink), Sink).serve_forever()
        return
    rows = run(args)
    if args.result_filename is not None:
        write_rows(args.result_filename, rows)


if __name__ == "__main__":
    main()
