"""``tercet bench`` as it is typed: against a server on a socket, interrupted, and with flags that are wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tercet.cli import main
from tercet.cluster.ports import free_ports
from tercet_lab.bench.results import BenchResult, load_result, save_result
from tercet_lab.tables import Requests
from tests.unit.bench.openai_server import FakeServer
from tests.unit.bench.test_report import sweep

pytestmark = pytest.mark.processes

SMALL = "random,input_len=20,output_len=4"


async def start(*flags: str, group: bool = False) -> asyncio.subprocess.Process:
    """``tercet bench``; or the benchmark of transfers in a ``group`` of processes of its own, as a terminal does it."""
    command = ("benchmarks.transfer",) if group else ("tercet.cli", "bench")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *command,
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=group,
    )


async def run(*flags: str) -> tuple[int | None, str]:
    """Exit code, and everything that was printed."""
    process = await start(*flags)
    printed, complained = await process.communicate()
    return process.returncode, (printed + complained).decode()


async def serve(server: FakeServer, file: Path, *flags: str) -> tuple[BenchResult, str]:
    code, text = await run("serve", "--base-url", server.url, "--result-filename", str(file), *flags)
    assert code == 0, text
    return load_result(file), text


def exit_code(monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "argv", ["tercet", "bench", *flags])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    return caught.value.code


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that a wrong command line prints before it exits with 2."""
    assert exit_code(monkeypatch, *flags) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


async def test_serve_measures_a_sweep_and_keeps_everything(server: FakeServer, tmp_path: Path) -> None:
    found, text = await serve(
        server, tmp_path / "run.json", "--request-rate", "40,80", "--num-prompts", "6", "--num-warmups", "2",
        "--workload", SMALL, "--goodput", "ttft:5000", "--header", "api-key=secret", "--seed", "9", "--label", "line",
        "--records", str(tmp_path / "requests.csv"),
    )  # fmt: skip
    rows = list(Requests.read(tmp_path / "requests.csv").rows())
    assert [(row["ok"], row["met_slo"], row["output_tokens"]) for row in rows] == [(True, True, 4)] * 12
    assert [(point.label, point.request_rate, len(point.records)) for point in found.points] == [
        ("line", 40.0, 8), ("line", 80.0, 8),
    ]  # fmt: skip
    assert all((p.metrics["completed"], p.metrics["failed"]) == (6, 0) for p in found.points)
    assert all(p.metrics["request_goodput"] == p.metrics["request_throughput"] for p in found.points)
    assert (found.seed, found.config["num-prompts"], found.config["workload"]) == (9, 6, [SMALL])
    assert {"tercet", "python", "aiohttp"} <= found.versions.keys()
    assert {"cpu", "cores", "memory_gib", "system"} <= found.machine.keys()
    assert (found.target["model"], found.target["max_model_len"]) == ("words", 4096)
    assert "--request-rate" in found.command
    assert "secret" not in (tmp_path / "run.json").read_text()
    assert {len(body["prompt"]) for body in server.bodies} == {20}
    assert {headers["api-key"] for headers in server.headers} == {"secret"}
    for told in ("line, 40 requests/s", "TTFT", "TPOT", "ITL", "E2EL (JCT)", "6 completed, 0 failed", "goodput"):
        assert told in text


async def test_compare_interleaves_programs_and_a_peer(server: FakeServer, tmp_path: Path) -> None:
    code, text = await run(
        "compare", "--base-url", server.url, "--program", "a", "--program", "b", "--also", f"peer={server.url}",
        "--rounds", "2", "--resamples", "100", "--request-rate", "60", "--num-prompts", "4", "--workload", SMALL,
        "--result-filename", str(tmp_path / "c.json"),
    )  # fmt: skip
    assert code == 0, text
    found = load_result(tmp_path / "c.json")
    assert sorted((point.round, point.label) for point in found.points) == [
        (number, label) for number in range(2) for label in ("a", "b", "peer")
    ]  # fmt: skip
    assert [point.round for point in found.points] == [0, 0, 0, 1, 1, 1]
    assert {(ratio.label, ratio.baseline, ratio.rounds) for ratio in found.ratios} == {("b", "a", 2), ("peer", "a", 2)}
    asked = [headers.get("x-tercet-program") for headers in server.headers]
    assert (asked.count("a"), asked.count("b"), asked.count(None)) == (8, 8, 8)
    # One round: the same arrivals for all. No two cells: the same words.
    first = {p.label: [r.scheduled for r in p.records] for p in found.points if p.round == 0}
    assert first["a"] == first["b"] == first["peer"]
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 24
    assert "| b / a |" in text


async def test_a_program_that_does_not_exist_ends_a_comparison_before_it_starts(
    server: FakeServer, tmp_path: Path
) -> None:
    server.programs = {"a", "b"}
    file = tmp_path / "c.json"
    code, text = await run(
        "compare", "--base-url", server.url, "--program", "a", "--program", "c", "--also", f"peer={server.url}",
        "--request-rate", "60", "--num-prompts", "4", "--workload", SMALL, "--result-filename", str(file),
    )  # fmt: skip
    assert (code, text) == (2, "tercet: --program: there is no program 'c'; choose a, b\n")
    assert server.bodies == []
    assert not file.exists()


async def test_a_server_that_is_not_there_is_no_matter_of_a_librarys_words(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    file = str(tmp_path / "run.json")
    flags = (
        "serve",
        "--base-url",
        url,
        "--request-rate",
        "1",
        "--num-prompts",
        "1",
        "--workload",
        SMALL,
        "--result-filename",
        file,
    )
    code, text = await run(*flags)
    assert (code, text) == (1, f"tercet: {url} does not answer as an OpenAI server: Connection refused\n")


def test_the_variable_says_which_server_if_no_flag_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (f"http://127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    monkeypatch.setenv("TERCET_URL", one)
    assert exit_code(monkeypatch, "serve", "--request-rate", "1") == 1
    assert one in capsys.readouterr().err
    assert exit_code(monkeypatch, "serve", "--request-rate", "1", "--base-url", other) == 1
    assert other in capsys.readouterr().err
    monkeypatch.setenv("TERCET_URL", "nowhere")
    assert refused(
        monkeypatch, capsys, "compare", "--program", "a", "--program", "b", "--request-rate", "1"
    ).startswith("tercet: --base-url: ")


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["ctrl-c", "kill"])
async def test_told_to_stop_a_measurement_of_transfers_ends_with_its_other_process(
    number: signal.Signals, to_all: bool
) -> None:
    process = await start("--chunk", "64", "--total", "1", "--backend", "host,tcp", "--rounds", "100000", group=True)
    async with asyncio.timeout(60):
        while not (children := spawned_by(process.pid)):
            await asyncio.sleep(0.05)
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        printed, complained = await process.communicate()
        while any(Path(f"/proc/{child}").exists() for child in children):
            await asyncio.sleep(0.05)
    told = [line for line in complained.splitlines() if line != b"starting" and not line.startswith(b"64 KiB chunks")]
    assert (process.returncode, printed, told) == (128 + number, b"", [])


def spawned_by(pid: int) -> list[str]:
    """Processes of Python's own that a process has started and that still run."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize(("rate", "number"), [("inf", signal.SIGINT), ("30", signal.SIGTERM)])
async def test_told_to_stop_it_writes_what_is_there(
    server: FakeServer, tmp_path: Path, rate: str, number: signal.Signals
) -> None:
    server.behave = {"hang": 2}
    file = tmp_path / "run.json"
    process = await start(
        "serve", "--base-url", server.url, "--result-filename", str(file), "--request-rate", rate,
        "--num-prompts", "500", "--workload", SMALL,
    )  # fmt: skip
    await server.hung.wait()
    process.send_signal(number)
    printed, complained = await process.communicate()
    assert process.returncode == 128 + number, complained.decode()
    assert b"Traceback" not in complained
    assert b"stopping" in printed + complained
    found = load_result(file)
    assert (found.partial, found.points[0].partial) == (True, True)
    assert {record.failure for record in found.points[0].records} == {"interrupted"}
    assert found.points[0].metrics["interrupted"] == len(found.points[0].records) >= 1


async def test_when_every_request_fails_the_file_says_why_and_the_exit_code_is_1(
    server: FakeServer, tmp_path: Path
) -> None:
    server.behave = {"status": 503}
    file = tmp_path / "run.json"
    code, text = await run(
        "serve", "--base-url", server.url, "--result-filename", str(file), "--request-rate", "inf",
        "--num-prompts", "3", "--workload", SMALL,
    )  # fmt: skip
    assert code == 1
    assert "3 x http: HTTP 503: no room" in text
    assert load_result(file).points[0].errors == {"http": 3}


def test_report_draws_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, one in enumerate(sweep()):
        save_result(one, tmp_path / f"{number}.json")
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    outputs = ["--figure", str(tmp_path / "f.svg"), "--figure", str(tmp_path / "f.png")]
    assert exit_code(monkeypatch, "report", *files, *outputs) == 0
    printed = capsys.readouterr().out
    assert exit_code(monkeypatch, "report", *files, "--table", str(tmp_path / "t.md")) == 0
    assert (tmp_path / "t.md").read_text(encoding="utf-8") == printed
    assert "disaggregated" in printed
    assert "mean TTFT" in (tmp_path / "f.svg").read_text(encoding="utf-8")
    assert (tmp_path / "f.png").stat().st_size > 1000


async def test_nobody_to_measure(tmp_path: Path) -> None:
    code, text = await run("serve", "--base-url", "http://127.0.0.1:9", "--request-rate", "1")
    assert (code, text.count("\n")) == (1, 1)
    assert "does not answer" in text


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("serve", "request-rate: is missing"),
        ("serve --request-rate 0", "request-rate: must be greater than 0, is 0"),
        ("serve --request-rate fast", "request-rate"),
        (
            "serve --request-rate 1 --arrival never",
            "--arrival: must be one of closed, constant, gamma, poisson, trace, is 'never'",
        ),
        ("serve --arrival closed", "concurrency: is missing"),
        ("serve --arrival closed --concurrency 2 --request-rate 1", "request-rate: does not apply to a closed loop"),
        ("serve --request-rate 1 --concurrency 2", "concurrency: applies to arrival closed"),
        ("serve --request-rate 1 --burstiness 0.5", "burstiness: applies to arrival gamma"),
        ("serve --request-rate 1 --duration 5 --num-prompts 5", "duration: give either duration or num-prompts"),
        ("serve --request-rate inf --duration 5", "duration: does not apply to rate inf"),
        ("serve --arrival trace", "arrival: trace needs exactly one workload"),
        ("serve --request-rate 1 --workload sonet", "did you mean sonnet?"),
        ("serve --request-rate 1 --workload sonnet,input_length=3", "did you mean input_len?"),
        ("serve --request-rate 1 --goodput ttft=5", "is not NAME:MILLISECONDS"),
        ("serve --request-rate 1 --goodput tttft:5", "tttft"),
        ("serve --request-rate 1 --extra-body []", "--extra-body: must be a JSON object"),
        ("serve --request-rate 1 --header nonsense", "--header"),
        ("serve --request-rate 1 --base-url localhost", "base-url: is not a URL"),
        ("serve --request-rate 1 --result-filename /nowhere/x.json", "--result-filename /nowhere/x.json"),
        ("serve --request-rate 1 --config /nowhere.yaml", "--config /nowhere.yaml: the file cannot be read: No such"),
        ("serve --request-rate 1 --bogus", "No such option: --bogus; tercet bench serve has --arrival, --base-url, "),
        ("serve --request-rates 1", "No such option: --request-rates; did you mean --request-rate?"),
        ("compare --request-rate 1 --program a", "a comparison needs at least two"),
        ("compare --request-rate 1 --program a --program a", "two have the same name"),
        ("compare --request-rate 1 --program a --program b --baseline c", "baseline: is c; choose one of a, b"),
        ("compare --request-rate 1 --program a --also peer=here", "also: peer=here is not NAME=URL"),
        ("report /nowhere.json", "/nowhere.json: No such file"),
        ("report x.json --figure x.gif", "must end with one of .png"),
        ("report", "Missing argument 'FILE...'"),
    ],
)
def test_wrong_flags_exit_with_2_and_one_line(
    flags: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(monkeypatch, capsys, *flags.split())


def test_a_files_unknown_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.yaml"
    file.write_text("request_rates: 1\n")
    line = refused(monkeypatch, capsys, "serve", "--config", str(file))
    assert line == f"tercet: --config {file}: unknown key request_rates; did you mean request-rate?"


class SometimesOdd(FakeServer):
    """Two of its answers have an event that nobody can read."""

    async def _answer(self, request: web.Request, body: dict[str, Any], how: dict[str, Any]) -> web.StreamResponse:
        odd = {3: b'data: {"choices": [{"text": "\xff"}]}\n\n', 7: b'data: {"x": %b}\n\n' % (b"[" * 5000 + b"]" * 5000)}
        found = odd.get(len(self.bodies), b"")
        return await super()._answer(request, body, {**how, "raw": found.hex()})


async def test_answers_that_cannot_be_read_have_failed_and_the_others_count(model: Path, tmp_path: Path) -> None:
    async with SometimesOdd(str(model)).running() as odd:
        found, _ = await serve(
            odd, tmp_path / "run.json", "--request-rate", "inf", "--num-prompts", "20", "--workload", SMALL,
            "--num-warmups", "0",
        )  # fmt: skip
    metrics = found.points[0].metrics
    assert (metrics["completed"], metrics["failed"], found.points[0].errors) == (18, 2, {"protocol": 2})
