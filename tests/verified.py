"""Records what marked tests ran on, for ``python -m scripts.matrix``: ``RECORD_VERIFIED=1 pytest``.

A mark names the feature, and the KV transport, by default that of engines on one machine. The transport may be that of
a parameter; a test without the parameter then verifies nothing. With ``vllm=False`` no vLLM computes in the test::

    @pytest.mark.verifies("KV between two devices", transport="{way}")
"""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import sys
from typing import Any

import msgspec
import pytest
from scripts.matrix import NO_TRANSPORT, NO_VLLM, PENDING, Outcome, Place

from tercet.vllm_plugin.hooks import vllm_version

MARK = "verifies"
ON_ONE_MACHINE = "host"


class Recording:
    """A plugin: writes the outcome of each marked test to a file of this run."""

    def __init__(self) -> None:
        now = datetime.datetime.now(tz=datetime.UTC)
        self._day = f"{now:%Y-%m-%d}"
        self._file = PENDING / f"{now:%Y%m%dT%H%M%S}-{os.getpid()}.jsonl"
        self._not_passed = set[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            # The report of a test has them, also where a forked process runs it.
            item.user_properties += [(MARK, msgspec.json.encode(each).decode()) for each in claims_of(item)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        claims = [msgspec.json.decode(str(value), type=Claim) for name, value in report.user_properties if name == MARK]
        if not report.passed:
            self._not_passed.add(report.nodeid)
        ended_well = report.when == "teardown" and report.nodeid not in self._not_passed
        if not claims or not (report.failed or ended_well):
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            for each in claims:
                outcome = Outcome(report.nodeid, each.feature, each.place, self._day, report.passed)
                file.write(msgspec.json.encode(outcome) + b"\n")


class Claim(msgspec.Struct):
    """What a test verifies if it passes."""

    feature: str
    place: Place


def claims_of(item: pytest.Item) -> list[Claim]:
    """The claims of a test's marks."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    device = _device(on_gpu=item.get_closest_marker("gpu") is not None)
    marks = [_claim(device, parameters, *mark.args, **mark.kwargs) for mark in item.iter_markers(MARK)]
    return [each for each in marks if each is not None]


def _claim(
    device: str, parameters: dict[str, Any], feature: str, transport: str | None = None, vllm: bool = True
) -> Claim | None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    version = vllm_version().partition("+")[0] if vllm else NO_VLLM
    way = transport or (ON_ONE_MACHINE if vllm else NO_TRANSPORT)
    if way.startswith("{"):
        if way.strip("{}") not in parameters:
            return None
        way = str(parameters[way.strip("{}")])
    return Claim(feature, Place(version, python, device, way))


def _device(on_gpu: bool) -> str:
    if not on_gpu:
        return f"CPU, {platform.machine().replace('_', '-')}"
    cuda: Any = importlib.import_module("torch.cuda")
    return str(cuda.get_device_name()) if cuda.is_available() else "no CUDA device"
