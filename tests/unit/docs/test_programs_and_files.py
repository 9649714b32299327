"""Python blocks of the manual load and serve on simulated engines; YAML blocks are taken by what they are for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import yaml

from tercet.cluster.up_config import UpConfig
from tercet.decisions.migration import policies_of
from tercet.decisions.scheduling import load_scheduling
from tercet.programs import load_program
from tercet.protocol import Request
from tercet.settings import RescheduleSettings, RouterConfig, decode_settings, read_yaml
from tercet_bench.bench_config import ServeConfig
from tercet_lab.bench.simulated.scenario import parse_fleet
from tercet_lab.bench.simulated.virtual_run import run_requests
from tercet_lab.sim import EngineOptions

from .pages import ROOT, Block, blocks, place

VALUES = ROOT / "deploy" / "kubernetes" / "tercet" / "values.schema.json"
PROFILE = "llama-3.1-8b-h100-tp1"


def request(number: int) -> Request:
    """Short, middling and long ones."""
    prompt = tuple(range(100 + 200 * number))
    return Request(prompt=prompt, seq_id=f"r{number}", sampling_params={"max_tokens": 8})


def functions(block: Block) -> Mapping[str, ast.AsyncFunctionDef | ast.FunctionDef]:
    tree = ast.parse(block.code)
    return {node.name: node for node in tree.body if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)}


@pytest.mark.parametrize("block", blocks("python"), ids=place)
def test_python_is_python_and_programs_serve(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    file = tmp_path / "mine.py"
    file.write_text(block.code)
    for name, node in functions(block).items():
        arguments = [each.arg for each in node.args.args]
        if arguments == ["request", "fleet"]:
            scheduling = None
            if 'by="scheduled"' in block.code:  # of the page that has the file as well
                (found,) = (each for each in blocks("yaml") if "nonCachedTokens" in each.code)
                (tmp_path / "scheduling.yaml").write_text(found.code)
                scheduling = load_scheduling(tmp_path / "scheduling.yaml")
            program = load_program(f"{file}:{name}")
            requests = [(0.1 * at, request(at)) for at in range(3)]
            outcome = run_requests(
                program, parse_fleet("1P1D"), PROFILE, EngineOptions(), requests, scheduling=scheduling
            )
            assert (len(outcome.requests["ended"]), outcome.failures, outcome.fallbacks) == (3, {}, 0)
        elif arguments == ["engines"]:
            assert policies_of(RescheduleSettings(policies=(f"{file}:{name}",)))


def as_settings(kind: Any, file: Path) -> None:
    decode_settings(kind, read_yaml(file))


@pytest.mark.parametrize("block", blocks("yaml"), ids=place)
def test_yaml_is_what_it_is_for(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(block.code)
    content = cast("dict[str, Any]", yaml.safe_load(block.code))
    first = block.code.partition("\n")[0]
    if "up.yaml" in first:
        as_settings(UpConfig, file)
    elif "router.yaml" in first:
        as_settings(RouterConfig, file)
    elif "values.yaml" in first:
        jsonschema.validate(content, json.loads(VALUES.read_text()))
    elif "base-url" in content:
        as_settings(ServeConfig, file)
    elif "plugins" in content:
        assert load_scheduling(file).profiles
    elif "engines" in content:
        assert parse_fleet(str(file)).engines
    else:  # another tool's
        assert content.keys() & {
            "services",
            "scrape_configs",
            "routes",
            "groups",
            "transport_socket",
            "providers",
            "rule_files",
        }, block.place


# The programs of docs/lab.md run as they are printed, one after the other.

PAGE = Path(__file__).parents[3] / "docs" / "lab.md"


@pytest.mark.slow
def test_its_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "page"}
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)):
        exec(compile(program, f"docs/lab.md, program {number}", "exec"), found)
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 401
    assert len(found["ttft"]) == 400
    assert found["best"]["rate"] == "12"
    assert "1P3D" in found["planned"].plans["plan"], "16 requests/s, 6 for each engine"
    assert (tmp_path / "ttft.pdf").stat().st_size > 1000
