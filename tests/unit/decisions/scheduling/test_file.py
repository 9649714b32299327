"""The scheduling file: what it makes, and that everything wrong in it is refused by the name of its field."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.decisions.scheduling import Engines, load_scheduling
from tercet.decisions.scheduling.assembly import BUILT_IN
from tercet.decisions.scheduling.filters import ByLabel, DecodeFilter
from tercet.decisions.scheduling.profiles import (
    AlwaysDisaggregate,
    MaxScorePicker,
    PrefixBasedDecider,
    WeightedRandomPicker,
)
from tercet.decisions.scheduling.scorers import LoadAwareScorer, NoHitLRUScorer, PrefixCacheScorer
from tercet.protocol import BadRequest

from .builders import Bench, View, listed, loaded

PD = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
  name: cache
  parameters: {blockSize: 16, lruCapacityPerServer: 100}
- type: no-hit-lru-scorer
- type: load-aware-scorer
  parameters: {threshold: 10}
- type: prefill-filter
- type: decode-filter
- type: weighted-random-picker
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 8}
- type: disagg-profile-handler
  parameters: {deciders: {prefill: prefix-based-pd-decider}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: weighted-random-picker}, {pluginRef: load-aware-scorer}]
- name: decode
  plugins:
  - pluginRef: no-hit-lru-scorer
  - pluginRef: decode-filter
  - pluginRef: cache
    weight: 2.5
"""

MINE = """
from tercet.decisions.scheduling import Decision, Engines, Scorer

class Zone(Scorer, frozen=True):
    zone: str
    def score(self, decision: Decision, engines: Engines):
        return [1.0 if engine.labels.get("zone") == self.zone else 0.0 for engine in engines]

class Lazy(Scorer, frozen=True):
    pass

class Stranger:
    def score(self, decision, engines): return []
"""


def test_a_file_in_llm_ds_form(tmp_path: Path) -> None:
    made = loaded(tmp_path, PD)
    decode, prefill = made.profiles["decode"], made.profiles["prefill"]
    assert [type(each) for each in decode.filters] == [DecodeFilter]
    assert [(type(scorer), weight) for scorer, weight in decode.scorers] == [
        (PrefixCacheScorer, 2.5),
        (NoHitLRUScorer, 1.0),  # needs what the other found, and so runs after it
    ]
    assert decode.scorers[0][0] == PrefixCacheScorer(
        block_size=16, max_prefix_blocks_to_match=2048, lru_capacity_per_server=100
    )
    assert isinstance(decode.picker, MaxScorePicker)
    assert isinstance(prefill.picker, WeightedRandomPicker)
    assert prefill.scorers[0][0] == LoadAwareScorer(threshold=10)
    assert made.decider == PrefixBasedDecider(non_cached_tokens=8)
    assert made.profile("scheduled", "prefill") is prefill
    assert made.profile("scheduled", "both") is decode
    assert made.profile("prefill", "decode") is prefill
    assert made.profile("nonsense", "decode") is None


def test_one_profile_serves_every_role(tmp_path: Path) -> None:
    made = loaded(tmp_path, "plugins: [{type: random-picker}]\nschedulingProfiles: [{name: only}]")
    assert made.profile("scheduled", "prefill") is made.profiles["only"]
    assert made.decider == AlwaysDisaggregate()


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_every_built_in_plugin_can_be_named(tmp_path: Path, kind: str) -> None:
    needed = {
        "by-label": "{label: zone}",
        "utilization-filter": "{conditions: [{metric: waiting-queue, maxValue: 3}]}",
    }.get(kind, "{}")
    text = f"plugins: [{{type: {kind}, parameters: {needed}}}]\nschedulingProfiles: [{{name: prefill}}]"
    if kind == "disagg-profile-handler":
        text = text.replace("{name: prefill}", "{name: prefill}, {name: decode}")
    loaded(tmp_path, text)


def test_a_plugin_of_the_users_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    text = "plugins: [{type: 'mine.py:Zone', name: z, parameters: {zone: x}}]\n"
    made = loaded(tmp_path, text + "schedulingProfiles: [{name: p, plugins: [{pluginRef: z, weight: 3}]}]")
    bench = Bench(View("a", labels={"zone": "y"}), View("b", labels={"zone": "x"}))
    ((scorer, _),) = made.profiles["p"].scorers
    assert listed(scorer.score(bench.decision(), bench.engines)) == [0, 1]
    assert isinstance(bench.engines, Engines)
    assert made.profiles["p"].pick(bench.decision(), bench.engines) == bench.engines.rows[1]


P = "schedulingProfiles: [{name: p}]"


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        (f"plugins: []\n{P}\nextra: 1", "extra", "the keys are plugins, schedulingProfiles"),
        (f"plugins: [{{type: random-picker, nam: x}}]\n{P}", "plugins[0].nam", "did you mean name?"),
        (f"plugins: [{{name: x}}]\n{P}", "plugins[0]", "type"),
        (f"plugins: [{{type: nope}}]\n{P}", "plugins[0].type", "no plugin 'nope'; choose one of active-request"),
        (
            f"plugins: [{{type: queue-scorer}}, {{type: load-aware-scorer, parameters: {{treshold: 1}}}}]\n{P}",
            "plugins[1].parameters.treshold",
            "did you mean threshold?",
        ),
        (
            f"plugins: [{{type: queue-scorer, parameters: {{a: 1}}}}]\n{P}",
            "plugins[0].parameters.a",
            "no keys are allowed here",
        ),
        (
            f"plugins: [{{type: load-aware-scorer, parameters: {{threshold: 0}}}}]\n{P}",
            "plugins[0].parameters.threshold",
            "must be at least 1",
        ),
        (f"plugins: [{{type: by-label}}]\n{P}", "plugins[0].parameters", "label"),
        (f"plugins: [{{type: queue-scorer}}, {{type: queue-scorer}}]\n{P}", "plugins[1].name", "already"),
        ("plugins: []\nschedulingProfiles: []", "schedulingProfiles", "must not be empty"),
        ("plugins: []", "scheduling", "schedulingProfiles"),
        ("plugins: []\nschedulingProfiles: [{name: p}, {name: p}]", "schedulingProfiles[1].name", "already"),
        ("plugins: []\nschedulingProfiles: [{name: least_loaded}]", "schedulingProfiles[0].name", "is reserved"),
        ("plugins: []\nschedulingProfiles: [{name: scheduled}]", "schedulingProfiles[0].name", "is reserved"),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: q}]}]",
            "schedulingProfiles[0].plugins[0].pluginRef",
            "there are queue-scorer",
        ),
        (
            "plugins: [{type: queue-scorer}]\n"
            "schedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer, wight: 1}]}]",
            "schedulingProfiles[0].plugins[0].wight",
            "did you mean weight?",
        ),
        (
            "plugins: [{type: queue-scorer}]\n"
            "schedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer, weight: -1}]}]",
            "schedulingProfiles[0].plugins[0].weight",
            "must be at least 0",
        ),
        (
            "plugins: [{type: queue-scorer}]\n"
            "schedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer, weight: .nan}]}]",
            "schedulingProfiles[0].plugins[0].weight",
            "",
        ),
        (
            "plugins: [{type: random-picker}]\n"
            "schedulingProfiles: [{name: p, plugins: [{pluginRef: random-picker, weight: 1}]}]",
            "schedulingProfiles[0].plugins[0].weight",
            "is not a scorer",
        ),
        (
            "plugins: [{type: random-picker}, {type: max-score-picker}]\n"
            "schedulingProfiles: [{name: p, plugins: [{pluginRef: random-picker}, {pluginRef: max-score-picker}]}]",
            "schedulingProfiles[0].plugins[1].pluginRef",
            "second picker",
        ),
        (
            "plugins: [{type: single-profile-handler}]\n"
            "schedulingProfiles: [{name: p, plugins: [{pluginRef: single-profile-handler}]}]",
            "schedulingProfiles[0].plugins[0].pluginRef",
            "is not a filter, scorer or picker",
        ),
        (
            "plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: p}, {name: q}]",
            "schedulingProfiles",
            "there are 2",
        ),
        (
            f"plugins: [{{type: disagg-profile-handler}}]\n{P}",
            "plugins[0].parameters.profiles.prefill",
            "no profile 'prefill'",
        ),
        (
            "plugins: [{type: disagg-profile-handler, parameters: {deciders: {prefill: me}}}]\n"
            "schedulingProfiles: [{name: prefill}, {name: decode}]",
            "plugins[0].parameters.deciders.prefill",
            "no decider 'me'",
        ),
        (
            f"plugins: [{{type: single-profile-handler}}, {{type: disagg-profile-handler}}]\n{P}",
            "plugins[1].type",
            "second profile handler",
        ),
        ("kind: Pod\nplugins: []\n" + P, "kind", "must be one of EndpointPickerConfig"),
        (f"plugins: []\n{P}\n{P}", "scheduling", "twice"),
        ("plugins: [", "scheduling", "not YAML"),
        ("just words", "scheduling", "a mapping of keys to values"),
        (f"plugins: [{{type: 'gone.py:X'}}]\n{P}", "plugins[0].type", "no file gone.py"),
        (f"plugins: [{{type: 'mine.py:Gone'}}]\n{P}", "plugins[0].type", "not a class"),
        (f"plugins: [{{type: 'mine.py:Stranger'}}]\n{P}", "plugins[0].type", "not a class"),
        (f"plugins: [{{type: 'mine.py:Lazy'}}]\n{P}", "plugins[0].type", "no method score"),
        (f"plugins: [{{type: 'mine.py:Zone'}}]\n{P}", "plugins[0].parameters", "zone"),
        (
            f"plugins: [{{type: 'mine.py:Zone', parameters: {{zone: x, zoom: 1}}}}]\n{P}",
            "plugins[0].parameters.zoom",
            "the keys are zone",
        ),
        (f"plugins: [{{type: 'broken.py:X'}}]\n{P}", "plugins[0].type", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, text: str, field: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(BadRequest) as raised:
        loaded(tmp_path, text)
    assert raised.value.param == field
    file = f"scheduling: {tmp_path / 'scheduling.yaml'}: "
    assert raised.value.message.startswith(file if field == "scheduling" else f"{file}{field}: ")
    assert says in raised.value.message
    assert "\n" not in raised.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read") as raised:
        load_scheduling(tmp_path / "none.yaml")
    assert raised.value.param == "scheduling"


def test_parameters_have_the_names_of_llm_d() -> None:
    assert ByLabel.__struct_encode_fields__ == ("label", "validValues", "allowsNoLabel", "strict")
