"""Filters: who stays."""

from __future__ import annotations

import pytest

from tercet.decisions.scheduling.filters import (
    ByLabel,
    ByLabelSelector,
    DecodeFilter,
    HealthFilter,
    PrefillFilter,
    SaturationFilter,
)
from tercet.decisions.scheduling.plugin import Filter

from .builders import Bench, View


def kept(bench: Bench, plugin: Filter) -> str:
    engines = bench.engines
    return "".join(engine.name for engine in engines.where(plugin.keep(bench.decision(), engines)))


@pytest.mark.parametrize(
    ("plugin", "names"),
    [(PrefillFilter(), "pb"), (PrefillFilter(allows_both=False), "p"), (DecodeFilter(), "db")],
)
def test_roles(plugin: Filter, names: str) -> None:
    bench = Bench(View("p", "prefill"), View("d", "decode"), View("b", "both"))
    assert kept(bench, plugin) == names


@pytest.mark.parametrize(
    ("plugin", "names"),
    [
        (ByLabel(label="zone", valid_values=frozenset({"x"})), "a"),
        (ByLabel(label="zone", valid_values=frozenset({"x", "y"})), "ab"),
        (ByLabel(label="zone", valid_values=frozenset({"x"}), allows_no_label=True), "ac"),
        (ByLabel(label="gpu"), ""),
        (ByLabelSelector(match_labels={"zone": "x"}), "a"),
        (ByLabelSelector(match_labels={"zone": "y", "gpu": "h"}), "b"),
        (ByLabelSelector(match_labels={"zone": "x", "gpu": "h"}), ""),
    ],
)
def test_labels(plugin: Filter, names: str) -> None:
    bench = Bench(View("a", labels={"zone": "x"}), View("b", labels={"zone": "y", "gpu": "h"}), View("c"))
    assert kept(bench, plugin) == names


def test_health_is_the_last_answer() -> None:
    assert kept(Bench(View("a", reachable=False), View("b")), HealthFilter()) == "b"


def test_health_may_ask_for_a_recent_word() -> None:
    bench = Bench(View("a"), View("b"), View("never"))
    bench.report("a")
    bench.now += 5
    bench.report("b")
    assert kept(bench, HealthFilter(max_age=5)) == "ab"
    assert kept(bench, HealthFilter(max_age=4.9)) == "b"


def test_saturation_has_two_limits_and_the_limit_itself_passes() -> None:
    bench = Bench(View("a"), View("b"), View("c"), View("d"))
    bench.report("a", waiting=5, kv=0.8)
    bench.report("b", waiting=6)
    bench.report("c", kv=0.81)
    bench.report("d", waiting=7)
    assert kept(bench, SaturationFilter()) == "a"
    assert kept(bench, SaturationFilter(queue_depth_threshold=6)) == "ab"
    assert kept(bench, SaturationFilter(kv_cache_util_threshold=0.9)) == "ac"


def test_an_old_report_counts_as_full_unless_unknown_is_allowed() -> None:
    bench = Bench(View("old"), View("new"), View("full"))
    bench.report("old")
    bench.now += 1.1
    bench.report("new")
    bench.report("full", waiting=9)
    assert kept(bench, SaturationFilter()) == "new"
    assert kept(bench, SaturationFilter(allows_unknown=True)) == "oldnew"
