"""Every query of the dashboards and rules, asked of a real Prometheus that scrapes a simulated fleet under load."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tercet.cluster.ports import free_ports
from tests.longest_wait import LONGEST_WAIT_S
from tests.simulated_processes import MODEL, ask, fleet, wait_for

from .pages import ROOT

PROMETHEUS = shutil.which("prometheus")
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
VARIABLES = {"$__rate_interval": "20s", "$engine": ".*", "$instance": ".*", "$program": ".*"}
# What a fleet with traffic and one move has; others count errors, pickers, vLLM's layer and real KV transports.
THERE = frozenset(
    {
        "tercet_engine_kv_usage_ratio", "tercet_engine_report_age_seconds", "tercet_engine_running",
        "tercet_engine_up", "tercet_engine_waiting", "tercet_fleet_state_failed", "tercet_fleet_state_version",
        "tercet_kv_sent_bytes_total", "tercet_move_pause_seconds_bucket", "tercet_moved_bytes_total",
        "tercet_moves_running", "tercet_moves_total", "tercet_program_version", "tercet_requests_in_flight",
        "tercet_requests_queued", "tercet_sequences_total", "tercet_tpot_seconds_bucket", "tercet_ttft_seconds_bucket",
        "tercet_verb_seconds_bucket", "tercet_workers",
    }
)  # fmt: skip


def of_dashboards() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "deploy" / "grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in VARIABLES.items():
                    query = query.replace(variable, value)
                yield f"{file.name}: {panel['title']}", query


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Generator[str]:
    (port,) = free_ports("127.0.0.1", 1)
    jobs = [{"job_name": "tercet", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}]
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/-/ready")
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()
            process.wait(LONGEST_WAIT_S)


def asked(api: str, query: str) -> list[Any]:
    try:
        answer = ask(f"{api}/query?query={urllib.parse.quote(query)}")
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    assert answer["status"] == "success", query
    assert not answer.get("warnings"), (query, answer["warnings"])
    return [each for each in answer["data"]["result"] if each["value"][1] != "NaN"]


class Load:
    """Requests one after another, while entered; one of them is moved."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            prompt = [(number * 1000 + token) % 30000 for token in range(600)]
            ask(f"{self._url}/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 40})

    def move_one(self) -> None:
        """A sequence goes to the other decode engine; one that ends meanwhile is not moved, and another one is."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for found in ask(f"{self._url}/tercet/v1/sequences"):
                other = {"d": "e", "e": "d"}.get(found["engine"])
                path = f"/tercet/v1/sequences/{urllib.parse.quote(found['seq_id'])}/move"
                if other is None or not found["tokens"]:
                    continue
                try:
                    moved = ask(f"{self._url}{path}", {"destination": other, "reason": "by hand"})
                except urllib.error.HTTPError:
                    continue
                if moved["outcome"] == "moved" and moved["pause"] is not None:
                    return
        raise AssertionError("nothing could be moved")


@pytest.mark.processes
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus on this machine")
def test_every_query_answers_and_what_must_have_data_has(tmp_path: Path) -> None:
    with fleet(tmp_path) as (url, ports):
        targets = [f"127.0.0.1:{port}" for port in ports]
        with prometheus(tmp_path, targets) as api, Load(url) as load:
            _wait_until(api, 'sum(up{job="tercet"}) == 4')
            until = time.monotonic() + 90
            while not asked(api, "sum(rate(tercet_moves_total[20s])) > 0"):  # a rate needs two samples that differ
                assert time.monotonic() < until
                load.move_one()
                time.sleep(1)
            _wait_until(api, "sum(rate(tercet_ttft_seconds_count[20s])) > 0")
            for name, query in of_dashboards():
                found = asked(api, query)
                metrics = set(re.findall(r"\b(?:tercet|inference|llm_d|vllm:)\w+", query))
                if metrics <= THERE and 'outcome="failed"' not in query:
                    assert found, (name, query)
            _wait_until(api, "tercet:ttft_seconds:p99_5m")
            groups = ask(f"{api}/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def _wait_until(api: str, query: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not asked(api, query):
        assert time.monotonic() < deadline, query
        time.sleep(0.5)
