"""The table of `python -m scripts.gpu_report`, and what it is made of, without a device."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from scripts import gpu_report
from scripts.gpu_report import Measured, latencies, rows_of


def test_the_table_says_what_is_compared_with_what() -> None:
    rows = {row[0]: row[1] for row in rows_of(Measured(0.1, 0.104, 0.010, 0.0101, 25e9, 20e9, 50e9, 1))}
    assert rows["where"] == "one device, shared by both engines"
    assert rows["TTFT through two engines / one alone"] == "1.040"
    assert rows["decode step with Tercet / plain vLLM"] == "1.010"
    assert rows["staged copy / plain copy of the device"] == "0.80"
    assert rows["read over NIXL / plain copy of the device"] == "2.00"


def test_the_table_says_why_nixl_does_not_read() -> None:
    rows = {row[0]: row[1] for row in rows_of(Measured(1, 1, 1, 1, 1, 1, "nixl: it cannot be loaded", 2))}
    assert rows["read over NIXL / plain copy of the device"] == "nixl: it cannot be loaded"


def test_what_nixl_reads_is_timed_with_host_memory_in_the_devices_role(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="scripts/install-transport-extras installs it", exc_type=ImportError)
    monkeypatch.setattr(gpu_report, "ROUNDS", 1)
    found = gpu_report.nixl_speed("cpu", 16 * 1024 * 1024)
    assert isinstance(found, float)
    assert found > 0


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(4):
                self.wfile.write(b'data: {"choices": []}\n\n')
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_a_stream_has_a_first_token_and_gaps(server: str) -> None:
    first, gap = latencies(server, "m", 10)
    assert first > 0
    assert gap >= 0


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "list_devices", tuple)
    monkeypatch.setattr("sys.argv", ["gpu_report"])
    with pytest.raises(SystemExit, match="no GPU"):
        gpu_report.main()
