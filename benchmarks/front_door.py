"""The cost of a streamed token in the router, compared with vLLM's API server behind the Rust `vllm-router`.

    python benchmarks/front_door.py [--router-wheel DIR] [--dynamo PYTHON] [--result-filename FILE]
    python benchmarks/front_door.py --kinds all [--rounds 5] [--slow-path] [--checkout FOLDER]

A token source, which is an engine with ready-made tokens, sends one token to each stream every 20 ms. Clients in a
separate process keep 16 and 64 streams of 100 tokens running. The CPU time (user and system) of the serving
processes is divided by the number of tokens that the clients received; it includes detokenisation and the handling of
requests. Then the time to first token is measured at 100 requests/s (it is the router's time, since the source answers
immediately), and the largest number of tokens that one process can serve.

Each server gets one message per step from its source process: the router in the protocol of Tercet's engines, the API
server in that of vLLM's engine core. `writes alone` is a server that only writes ready-made chunks: a server that sends
each token separately cannot cost less. `vllm-router` is measured only if `--router-wheel` is given.
`--dynamo PYTHON` adds Dynamo's frontend with Dynamo's mock engine, run by a Python that has `ai-dynamo` 1.6.1 (its
steps take about 20 ms at any `--step`). `--step` is the time between two tokens of a stream: if it is short, processes
do not sleep between steps, and their caches stay warm.

`--kinds` measures other kinds of streams instead: each kind with 16 streams, by the router and the API server in turn,
in `--rounds` rounds, so that other load of the machine affects all equally. `benchmarks/stream_kinds.py` defines the
requests of the clients and the texts of the model. The table has medians over the rounds with the smallest and the
largest value, and medians of the rounds' ratios. A token of a tool call may have no event, so the number of tokens per
event is computed from whole streams. `--slow-path` measures the router with `--fast-path off` too: a kind belongs to
the fast path if its share of that is at most 0.6. `--checkout FOLDER` measures the router of another checkout of Tercet
too, with that checkout's token source. Of two processes of the same code, one may be a tenth slower: `--routers 4`
starts four of each checkout, and measures one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.stream_kinds import KINDS, PARSERS, StreamKind, scripts_of

STEP = 0.02
START_SECONDS = 600
MODEL_NAME = "m"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass(frozen=True)
class Load:
    """The results of the clients. ``ttft`` is the median time to first token, in milliseconds."""

    tokens: float
    requests: int
    seconds: float
    ttft: float


@dataclass(frozen=True)
class Row:
    """One measurement. ``cpu`` is the number of cores that the serving processes used."""

    server: str
    case: str
    us_per_token: float
    tokens_per_second: float
    ttft_ms: float
    cpu: float


# ---- clients -------------------------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """A connection that sends requests, counts the events of answers, and detects their end. It parses nothing else."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._over = asyncio.Event()
        self._tail = b""
        self._began = 0.0
        self._events = 0
        self._first = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def closed(self) -> bool:
        return self._transport.is_closing()

    async def ask(self, request: bytes) -> None:
        self._over.clear()
        self._first, self._began, self._events = True, time.perf_counter(), 0
        self._transport.write(request)
        await self._over.wait()

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: {")
        if events and self._first:
            self._first = False
            self._clients.ttfts.append(time.perf_counter() - self._began)
        self._events += events
        self._clients.events += events
        self._tail = (self._tail + data)[-24:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._clients.requests += 1
            self._clients.whole += self._events
            self._over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()


class Clients:
    """The load on one port: closed (``streams`` at a time) or open (``rate`` per second)."""

    def __init__(self, port: int, tokens: int, kind: StreamKind) -> None:
        self.events = self.requests = self.whole = 0
        self.ttfts: list[float] = []
        body = json.dumps({"model": MODEL_NAME, "stream": True, **kind.body(PROMPT, tokens)})
        self._port = port
        self._tokens = tokens * kind.more.get("n", 1)
        self._request = (
            f"POST {kind.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async def run(self, streams: int, rate: float, seconds: float) -> None:
        """Run the load. Print ``begin`` after a warm-up, and a :class:`Load` as JSON after ``seconds``."""
        tasks = [asyncio.create_task(self._again(index * STEP)) for index in range(streams)]
        tasks += [asyncio.create_task(self._open(rate))] if rate else []
        await asyncio.sleep(2.5 if streams else 1.0)
        events, requests, began = self.events, self.requests, time.perf_counter()
        self.ttfts.clear()
        print("begin", flush=True)
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        ttft = statistics.median(self.ttfts) * 1e3 if self.ttfts else 0.0
        # Tokens per event: 1, except for tool calls and for the first event of a chat, which has the role only.
        per_event = self._tokens * self.requests / self.whole if self.whole else 1.0
        found = Load((self.events - events) * per_event, self.requests - requests, took, ttft)
        print(json.dumps(asdict(found)), flush=True)
        for task in tasks:
            task.cancel()

    async def _connect(self) -> Stream:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(self), "127.0.0.1", self._port)
        return stream

    async def _again(self, delay: float) -> None:
        await asyncio.sleep(delay)
        stream = await self._connect()
        while True:
            await stream.ask(self._request)

    async def _open(self, rate: float) -> None:
        idle: list[Stream] = []
        tasks: set[asyncio.Task[None]] = set()

        async def one() -> None:
            idle[:] = [
                stream for stream in idle if not stream.closed
            ]  # servers close connections that are idle for long
            stream = idle.pop() if idle else await self._connect()
            await stream.ask(self._request)
            idle.append(stream)

        due = time.monotonic()
        while True:
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)


# ---- the measurement -----------------------------------------------------------------------------------------


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of processes so far, by the clock that Linux has for each: /proc counts in steps of 10 ms."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def measure(
    server: str,
    case: str,
    port: int,
    pids: list[int],
    seconds: float,
    tokens: int,
    streams: int = 0,
    rate: float = 0.0,
    kind: str = "plain",
) -> Row:
    """Put load on a port, print and return the cost for the processes ``pids``."""
    command = [
        sys.executable,
        __file__,
        "--clients-of",
        str(port),
        "--streams",
        str(streams),
        "--request-rate",
        str(rate),
    ]
    command += ["--seconds", str(seconds), "--tokens", str(tokens), "--kinds", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        clients.stdout.readline()
        before = cpu_seconds(pids)
        found = json.loads(clients.stdout.readline())
        used = cpu_seconds(pids) - before
    received, took = found["tokens"], found["seconds"]
    row = Row(server, case, used / max(1, received) * 1e6, received / took, found["ttft"], used / took)
    print(f"{server:24}{case:>22}{row.us_per_token:10.1f}{row.tokens_per_second:10.0f}{row.ttft_ms:8.2f}{row.cpu:7.2f}")
    return row


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def process(
    *command: str, port: int | None = None, path: str = "/health", python: str = sys.executable, **env: str
) -> Generator[int]:
    """Run a process while the context is open. Yield its id, as soon as it answers on ``port`` (None: immediately)."""
    import urllib.error
    import urllib.request

    variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **env}
    child = subprocess.Popen([python, *command], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while port is not None:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} did not start")
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).close()
                break
            time.sleep(0.2)
        yield child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()


@contextmanager
def dynamo(python: str, model: str, port: int) -> Generator[int]:
    """Run Dynamo's frontend with Dynamo's mock engine while the context is open. Yield the frontend's process id."""
    planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engine = ("--model-path", model, "--model-name", MODEL_NAME, "--decode-speedup-ratio", "0.3")
        where = ("--endpoint", "dyn://dynamo.backend.generate")
        stack.enter_context(process("-m", "dynamo.mocker", *engine, *planes, *where, python=python, DYN_FILE_KV=folder))
        command = ("-m", "dynamo.frontend", "--http-port", str(port), *planes, "--router-mode", "round-robin")
        pid = stack.enter_context(process(*command, port=port, python=python, DYN_FILE_KV=folder))
        await_model(port)
        yield pid


def await_model(port: int) -> None:
    """Return when the server on a port lists a model. Raise ``RuntimeError`` after 120 s."""
    import urllib.request

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            if json.load(answer)["data"]:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server on port {port} did not list a model within 120 s")


def kinds_of(given: str) -> list[str]:
    """Return the kinds that ``--kinds`` names."""
    return list(KINDS) if given == "all" else [kind for kind in given.split(",") if kind]


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every case, by Tercet's router and by the other servers in turn."""
    from tercet.cluster.model import resolve_model

    model = resolve_model("smollm2", lambda _: None)
    rows: list[Row] = []
    kinds = kinds_of(args.kinds)
    flags: tuple[str, ...] = PARSERS if kinds else ()
    with ExitStack() as stack:
        stock, proxy, floor = (free_port() for _ in range(3))
        this = str(Path(__file__).with_name("token_source.py"))
        step = {"TOKEN_SOURCE_STEP": str(args.step), "TOKEN_SOURCE_SCRIPTS": scripts_of(kinds, model)}

        def start_router(source: str, fast_path: str = "on", **env: str) -> tuple[int, list[int]]:
            port, source_port = free_port(), free_port()
            engine = (source, "source", str(source_port))
            stack.enter_context(process(*engine, port=source_port, path="/tercet/v1/status", **step, **env))
            command = (
                "-m", "tercet.cli", "router", "--engine", f"http://127.0.0.1:{source_port}", "--program",
                "data_parallel", "--port", str(port), "--model", model, "--served-model-name", MODEL_NAME,
                "--log-level", "warning", "--fast-path", fast_path, *(("--", *flags) if flags else ()),
            )  # fmt: skip
            return port, [stack.enter_context(process(*command, port=port, **env))]

        sockets = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        stack.enter_context(process(this, "core", *sockets, **step))
        peer = ("peer", str(stock), model, *sockets, *flags)
        stock_pid = stack.enter_context(process(this, *peer, port=stock))
        servers: list[tuple[str, int, list[int]]] = []
        for _ in range(args.routers if kinds else 1):
            servers += [("tercet", *start_router(this)), ("vllm api server", stock, [stock_pid])]
            if kinds and args.slow_path:
                servers.append(("tercet, slow path", *start_router(this, "off")))
            if args.checkout:
                path = os.pathsep.join((str(args.checkout / "src"), str(args.checkout)))
                source = str(args.checkout / "benchmarks/token_source.py")
                servers.append(("other checkout", *start_router(source, PYTHONPATH=path)))
        if kinds:
            print(f"{'':46}{'us/token':>10}{'tokens/s':>10}{'TTFT':>8}{'cores':>7}")
            for number in range(args.rounds):
                for kind in kinds:
                    for name, port, pids in servers[:: -1 if number % 2 else 1]:
                        rows.append(measure(name, kind, port, pids, args.seconds, args.tokens, streams=16, kind=kind))
            print_kinds(rows, kinds, *dict.fromkeys(name for name, _, _ in servers))
            return rows
        writer_pid = stack.enter_context(process(this, "writer", str(floor), str(args.tokens), port=floor, **step))
        servers.append(("writes alone", floor, [writer_pid]))
        if args.router_wheel:
            path = os.pathsep.join(filter(None, (args.router_wheel, os.environ.get("PYTHONPATH", ""))))
            proxy_pid = stack.enter_context(
                process(
                    "-m", "vllm_router.launch_router", "--worker-urls", f"http://127.0.0.1:{stock}", "--host",
                    "127.0.0.1", "--port", str(proxy), "--log-level", "error", "--prometheus-port", str(free_port()),
                    port=proxy, PYTHONPATH=path,
                )
            )  # fmt: skip
            servers.append(("vllm-router + api server", proxy, [proxy_pid, stock_pid]))
        if args.dynamo:
            frontend = free_port()
            servers.append(("dynamo frontend", frontend, [stack.enter_context(dynamo(args.dynamo, model, frontend))]))
        print(f"{'':46}{'us/token':>10}{'tokens/s':>10}{'TTFT':>8}{'cores':>7}")
        for streams in (16, 64):
            for name, port, pids in servers:
                rows.append(measure(name, f"{streams} streams", port, pids, args.seconds, args.tokens, streams=streams))
        for name, port, pids in servers:
            rows.append(measure(name, "100 requests/s", port, pids, args.seconds, args.tokens, rate=100.0))
        rows += [
            measure("tercet", f"{streams} streams", *servers[0][1:], args.seconds, args.tokens, streams=streams)
            for streams in args.many
        ]
    return rows


def print_kinds(rows: Sequence[Row], kinds: Sequence[str], ours: str, *others: str) -> None:
    """Print the cost of each kind over all rounds, with its ratio to the other servers' and to the first kind's."""
    found = {
        (name, kind): [row.us_per_token for row in rows if (row.server, row.case) == (name, kind)]
        for name in (ours, *others)
        for kind in kinds
    }

    def share(first: list[float], second: list[float]) -> str:
        return f"{statistics.median(one / other for one, other in zip(first, second, strict=True)):.2f}"

    def price(each: list[float]) -> str:
        return f"{statistics.median(each):.0f} ({min(each):.0f} to {max(each):.0f})"

    titles = [title for name in others for title in (name, "share")]
    print(f"| kind | {ours} | {' | '.join(titles)} | of {kinds[0]} |\n| --- |{' ---: |' * (2 + len(titles))}")
    for kind in kinds:
        own = found[ours, kind]
        compared = [part for name in others for part in (price(found[name, kind]), share(own, found[name, kind]))]
        print(f"| {kind} | {price(own)} | {' | '.join(compared)} | {share(own, found[ours, kinds[0]])} |")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write measurements to a JSON file, with the machine and the date."""
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    path.write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients-of", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--request-rate", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--step", type=float, default=STEP, help="seconds between two tokens of a stream")
    parser.add_argument("--many", type=int, nargs="*", default=[200, 400], help="numbers of streams, to find the limit")
    parser.add_argument(
        "--kinds", default="", metavar="A,B", help=f"kinds of streams to measure instead: all, {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--checkout", type=Path, metavar="FOLDER", help="checkout of Tercet whose router is measured too"
    )
    parser.add_argument("--slow-path", action="store_true", help="with --kinds: the router's --fast-path off too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with --kinds; every second one is in reverse")
    parser.add_argument("--routers", type=int, default=1, help="router processes of each checkout, with --kinds")
    parser.add_argument("--router-wheel", help="folder with the unpacked wheel of vllm-router")
    parser.add_argument("--dynamo", metavar="PYTHON", help="Python interpreter with ai-dynamo 1.6.1")
    parser.add_argument("--result-filename", type=Path, help="JSON file for the measurements")
    args = parser.parse_args()
    for name in ("rounds", "routers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    unknown = [kind for kind in kinds_of(args.kinds) if kind not in KINDS]
    if unknown:
        parser.error(f"--kinds: {', '.join(unknown)}: unknown; choose from {', '.join(KINDS)}")
    if args.clients_of is not None:
        import uvloop

        clients = Clients(args.clients_of, args.tokens, KINDS[args.kinds or "plain"])
        uvloop.run(clients.run(args.streams, args.request_rate, args.seconds))
        return
    rows = run(args)
    if args.result_filename is not None:
        write_rows(args.result_filename, rows)


if __name__ == "__main__":
    main()
