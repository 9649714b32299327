"""The table of `python -m scripts.gpu_report`, and what it is made of, without a device."""

from __future__ import annotations

import http.server
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripts.gpu_report import __main__ as report
from scripts.gpu_report import answers as asking
from scripts.gpu_report import copies, random_model, servers
from scripts.gpu_report.answers import Latencies, answers, latencies, words_of
from scripts.gpu_report.table import Failed, Row, attempt, lines, ratio, share

from tercet.cluster.devices import Device
from tercet.protocol import TransferFailed
from tests.servers import served_in_thread


def test_a_ratio_is_held_against_what_it_ought_to_be() -> None:
    assert ratio("r", 0.104, 0.1, 1.05) == Row("r", "1.040 (104.00 / 100.00 ms)", "1.05 or less", True)
    assert ratio("r", 0.106, 0.1, 1.05).holds is False
    assert ratio("r", 1.0, Failed("failed: no memory"), 1.05) == Row("r", "failed: no memory", "1.05 or less", False)
    assert share("s", 20e9, 25e9, "") == Row("s", "20.0 GB/s, 0.80 of it")
    assert share("s", 20e9, Failed("x"), "") == Row("s", "20.0 GB/s")


def test_lines_stand_below_one_another() -> None:
    assert list(lines([Row("a", "1", "2", True), Row("longer", "22", "2", False), Row("c", "3")])) == [
        "a       1   2  ok",
        "longer  22  2  NOT",
        "c       3",
    ]


def fails() -> float:
    raise SystemExit("this does not start")


def test_what_fails_says_why_and_nothing_else_is_lost() -> None:
    assert attempt("x", fails) == Failed("failed: this does not start")
    assert attempt("x", lambda: 3) == 3


def test_the_report_goes_on_without_the_servers_that_do_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two engines do not start, and NIXL is not there: all other rows are measured."""

    @contextmanager
    def starts(model: str, *_: object) -> Generator[str]:
        yield "alone"

    @contextmanager
    def fleet(model: str, args: Sequence[str], flags: Sequence[str]) -> Generator[str]:
        if args == report.TWO:
            raise RuntimeError("CUDA out of memory")
        yield "alone"

    def measured(name: str) -> float:
        if name == "nixl":
            raise RuntimeError("nixl: it cannot be loaded")
        return {"plain_across": 1500e9, "plain_out": 50e9, "ipc": 750e9, "staged": 40e9}[name]

    gpu = Device("0", "NVIDIA H100 80GB HBM3", 1, 1, "GPU-1", "580.65.06")
    monkeypatch.setattr(report, "list_devices", lambda: (gpu,))
    monkeypatch.setattr(copies, "measured", measured)
    monkeypatch.setattr(servers, "plain_vllm", starts)
    monkeypatch.setattr(servers, "engine", starts)
    monkeypatch.setattr(servers, "fleet", fleet)
    monkeypatch.setattr(report, "latencies", lambda url, words: Latencies(0.1, 0.01, 0.02))
    monkeypatch.setattr(report, "answers", lambda url: ["a", "b"])
    monkeypatch.setattr(sys, "argv", ["gpu_report"])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 1
    table = {line[:33].strip(): line[33:].strip() for line in capsys.readouterr().out.splitlines()}
    assert "580.65.06" in table["device"]
    assert table["ipc: blocks of another process"].startswith("750.0 GB/s, 0.50 of it")
    assert "cannot be loaded" in table["nixl: blocks of another agent"]
    assert "NOT" not in table["nixl: blocks of another agent"]
    assert table["decode step: engine / plain vLLM"].startswith("1.000")
    assert table["TTFT: two engines / one"].startswith("failed: CUDA out of memory")
    assert table["answers of one engine"].startswith("2 of 2 equal")
    assert table["answers of two engines"].endswith("NOT")


def test_answers_that_differ_are_named() -> None:
    plain = report.Asked(Failed(""), ["a", "b", "c"])
    row = report._same("x", report.Asked(Failed(""), ["a", "B", "c"]), plain)
    assert (row.found, row.holds) == ("2 of 3 equal; others: 1", False)


def test_without_a_device_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "list_devices", tuple)
    monkeypatch.setattr("sys.argv", ["gpu_report"])
    with pytest.raises(SystemExit, match="no GPU"):
        report.main()


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_way_that_cannot_be_had_says_why() -> None:
    """In a process of its own; here, without a device."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(RuntimeError, match=r"NVIDIA|CUDA|device"):
        copies.measured("plain_out")


def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> float:
        raise TransferFailed("nixl: it cannot be loaded")

    monkeypatch.setitem(copies.WAYS, "nixl", missing)
    copies.main("nixl")
    assert json.loads(capsys.readouterr().out) == "nixl: it cannot be loaded"


@pytest.mark.slow
def test_what_nixl_reads_is_timed_with_host_memory_in_the_devices_role(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="scripts/install-transport-extras installs it", exc_type=ImportError)
    monkeypatch.setattr(copies, "ROUNDS", 1)
    assert copies.nixl("cpu", 16 * 1024 * 1024) > 0


@pytest.mark.vllm
def test_what_goes_through_buffers_is_timed_with_host_memory_in_the_devices_role() -> None:
    memory, scattered = copies.staged_memory("cpu", 16 * 1024 * 1024)
    with memory.reading(range(1), scattered[:4], 0, copies.BLOCK_BYTES) as found:
        assert found.left == 4 * copies.BLOCK_BYTES


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not body.get("stream"):
                return self._say(json.dumps({"choices": [{"text": body["prompt"][::-1]}]}).encode())
            return self._say(b'data: {"choices": []}\n\n' * 4 + b"data: [DONE]\n\n")

        def _say(self, text: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with served_in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def test_a_stream_has_a_first_token_and_gaps(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "STREAMS", 2)
    found = latencies(server, 10)
    assert found.first > 0
    assert min(found.gap, found.gap_of_several) >= 0


@pytest.mark.slow
def test_all_servers_are_asked_the_same(server: str) -> None:
    assert answers(server) == answers(server)
    assert answers(server)[3] == words_of(3, 160)[::-1]


@pytest.mark.processes
def test_a_server_that_does_not_start_is_an_error_and_is_gone() -> None:
    with pytest.raises(RuntimeError, match="ended with status"), servers._listening("json.tool", ["--no"]):
        pytest.fail("it started")


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_model.make, random_model.make_large])
def test_a_random_model_is_a_checkpoint_that_knows_all_text(make: Callable[[Path], Path], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    made = make(tmp_path)
    config: Any = AutoConfig.from_pretrained(made)
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    assert config.architectures == ["LlamaForCausalLM"]
    assert tokenizer.decode(tokenizer.encode("a sail, gr\u00fcn")) == "a sail, gr\u00fcn"
    assert max(tokenizer.encode("\u00ff")) < config.vocab_size
