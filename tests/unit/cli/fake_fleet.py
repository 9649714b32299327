"""`tercet` with small scripts in the place of vLLM: ``python -m tests.unit.cli.fake_fleet MARK MODE ARGUMENTS...``.

Each server has a child of its own. MARK is in every process's command line, so that a test finds what is left. MODE
says what the servers do: ``answers``, ``never-ready``, ``stubborn`` (ignores SIGTERM), ``breaks-off``.
"""

from __future__ import annotations

import functools
import http.server
import json
import signal
import subprocess
import sys
import time
from typing import Any

SLEEPER = "import sys, time; time.sleep(600)"
TRACE = {
    "program": "disaggregated", "ttft": 0.2, "tpot": 0.03,
    "events": [
        {"verb": "prep_recv", "engine": "decode-0", "seconds": 0.005, "end": 442},
        {"verb": "remote_send", "engine": "prefill-0", "seconds": 0.3, "end": 442, "computed": 442,
         "bytes": 10_000_000, "chunks": 30, "transport": "host", "to": "decode-0"},
        {"verb": "start_generate", "engine": "decode-0", "seconds": 0.03, "begin": 442, "received": 442},
    ],
}  # fmt: skip


def main() -> None:
    mark, mode, *arguments = sys.argv[1:]
    if arguments[0] == "serve":
        _serve(mark, mode, int(arguments[1]))
    else:
        _run_command_line(mark, mode, arguments)


def _run_command_line(mark: str, mode: str, arguments: list[str]) -> None:
    # As `tercet.cli.main` does for its own imports, which happen here already.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tercet.cli import main as tercet

    put_scripts(mark, mode)
    sys.argv = ["tercet", *arguments]
    tercet()


def put_scripts(mark: str, mode: str) -> None:
    """From now on, in fleets in the background too, servers are scripts."""
    from tercet.cli import detached
    from tercet.cluster import engine_command, local, model
    from tercet.cluster.child_process import Process

    def argv(port: int) -> list[str]:
        return [sys.executable, "-m", "tests.unit.cli.fake_fleet", mark, mode, "serve", str(port)]

    def engine_argv(spec: Any) -> list[str]:
        return argv(spec.port)

    def no_flags(_spec: Any) -> list[str]:
        return []  # vLLM would find that the model has no files

    def router_argv(config: Any, _log_dir: Any) -> list[str]:
        return argv(config.port)

    def known_model(name: str) -> str:
        return name

    def available_memory() -> int:
        return 64 * engine_command.GIB  # scripts need none of this machine's

    for name, fake in (("engine_argv", engine_argv), ("flags_argv", no_flags), ("router_argv", router_argv)):
        setattr(local, name, fake)
    setattr(local, "Process", functools.partial(Process, grace=3))  # noqa: B010
    setattr(model, "known_model", known_model)  # noqa: B010
    setattr(engine_command, "available_memory", available_memory)  # noqa: B010
    scripts = f"from tests.unit.cli.fake_fleet import put_scripts; put_scripts({mark!r}, {mode!r})"
    setattr(detached, "COMMAND", f"{scripts}; {detached.COMMAND}")  # noqa: B010


def _serve(mark: str, mode: str, port: int) -> None:
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", SLEEPER, mark])
    if mode == "never-ready":
        time.sleep(600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            if mode == "breaks-off":
                self.send_header("content-length", "1000")
            self.end_headers()
            events: list[dict[str, Any]] = [
                {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
                {"choices": [{"delta": {"content": "Maren [keeps] "}}]},
                {"choices": [{"delta": {"content": "it."}}]},
                {"choices": [], "usage": {}},
            ]
            said = [json.dumps(event) for event in events]
            if mode != "breaks-off":
                said += [json.dumps({"tercet": TRACE}), "[DONE]"]
            for data in said:
                self.wfile.write(f"data: {data}\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
