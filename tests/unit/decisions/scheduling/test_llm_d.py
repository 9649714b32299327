"""Files of llm-d: in its form, with what is a plugin there and none here."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from tercet.decisions.scheduling import load_scheduling
from tercet.decisions.scheduling.assembly import BUILT_IN
from tercet.decisions.scheduling.filters import (
    ByLabelSelector,
    LabelExpression,
    PrefillFilter,
    SaturationFilter,
    UtilizationCondition,
    UtilizationFilter,
)
from tercet.decisions.scheduling.profiles import AlwaysDisaggregate, ConcurrencyLimit, PrefixBasedDecider, Saturation
from tercet.decisions.scheduling.scorers import ActiveRequestScorer, PrefixCacheScorer, SessionAffinityScorer
from tercet.protocol import BadRequest
from tercet.protocol.headers import AGENT_HEADERS
from tercet_gateway.llm_d import (
    CONTEXT_LENGTH,
    DETECTOR_SECTIONS,
    PARAMETERS,
    PASSED_OVER,
    READ,
    REFUSED,
    RENAMED_TYPES,
    translated,
)

from .builders import Bench, View, request_of
from .llm_d_files import HANDLER, made_of, scorers, written

HEAD = "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\n"
PD = """
plugins:
- {type: disagg-headers-handler}
- {type: prefix-cache-scorer, parameters: {blockSizeTokens: 32, autoTune: false, lruCapacityPerServer: 5000}}
- {type: queue-scorer}
- {type: prefill-filter}
- {type: decode-filter}
- {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 20}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins:
  - {pluginRef: prefill-filter}
  - {pluginRef: max-score-picker}
  - {pluginRef: prefix-cache-scorer, weight: 3}
- name: decode
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: queue-scorer, weight: 1}
"""
PRECISE = """
plugins:
- {type: tokenizer, name: tokens, parameters: {modelName: some/model}}
- {type: endpoint-notification-source}
- {type: single-profile-handler}
- type: precise-prefix-cache-scorer
  parameters:
    tokenProcessorConfig: {blockSize: 64, hashSeed: "7"}
    indexerConfig: {kvBlockIndexConfig: {enableMetrics: true}}
- {type: max-score-picker}
dataLayer: {sources: [{pluginRef: endpoint-notification-source}]}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: tokens}
  - {pluginRef: precise-prefix-cache-scorer, weight: 2.0}
  - {pluginRef: max-score-picker}
"""


def test_prefill_and_decode(tmp_path: Path) -> None:
    found = load_scheduling(written(tmp_path, HEAD + PD))
    assert found.by_role == {"prefill": "prefill", "decode": "decode", "both": "decode"}
    assert found.decider == PrefixBasedDecider(non_cached_tokens=20)
    prefill = found.profiles["prefill"]
    assert prefill.filters == [PrefillFilter(allows_both=False)]
    cache = PrefixCacheScorer(block_size=32, max_prefix_blocks_to_match=2048, lru_capacity_per_server=5000)
    assert prefill.scorers == [(cache, 3.0)]


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tercet.decisions.scheduling"):
        found = load_scheduling(written(tmp_path, HEAD + PRECISE))
    assert [type(scorer).__name__ for scorer, _ in found.profiles["default"].scorers] == ["PrecisePrefixCacheScorer"]
    for name in ("tokenizer", "endpoint-notification-source", "dataLayer", "precise-prefix-cache-scorer.indexerConfig"):
        assert any(f"{name}:" in record.getMessage() for record in caplog.records), name


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (HEAD + PD.replace("queue-scorer}", "quue-scorer}"), "plugins"),
        (HEAD + PD.replace("autoTune", "autTune"), "autTune"),
        (HEAD + PD + "featureGate: [x]\n", "featureGate"),
        (PD, "plugins"),  # in our own form, what is no plugin here is refused
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        load_scheduling(written(tmp_path, text))


@pytest.mark.parametrize("content", [None, [], {}, {"apiVersion": "llm-d.ai/v1", "plugins": 3}, {"apiVersion": 7}])
def test_what_is_no_such_file_is_left_alone(content: object) -> None:
    assert translated(content) == (content, [])


# ---- files of the forms that llm-d publishes -----------------------------------------------------------------


DECIDER = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16}}
SOURCES = {"sources": [{"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "core-metrics-extractor"}]}]}


def test_the_default_of_its_charts(tmp_path: Path) -> None:
    found = made_of(
        tmp_path,
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "prefix-cache-scorer",
        {"type": "metrics-data-source", "parameters": {"scheme": "http", "path": "/metrics"}},
        "core-metrics-extractor",
        "openai-parser",
        profiles={"default": {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}},
        requestHandler={"parsers": [{"pluginRef": "openai-parser"}]},
        dataLayer=SOURCES,
    )
    assert scorers(found) == [("QueueScorer", 2), ("KVCacheUtilizationScorer", 2), ("PrefixCacheScorer", 3)]
    assert found.by_role["decode"] == "default"


def test_a_file_without_profiles_uses_what_it_has(tmp_path: Path) -> None:
    found = made_of(tmp_path, "queue-scorer", "decode-filter", "random-picker", "single-profile-handler")
    profile = found.profiles["default"]
    assert (len(profile.filters), scorers(found), type(profile.picker).__name__) == (
        1,
        [("QueueScorer", 1)],
        "RandomPicker",
    )


def test_what_engines_say_they_hold(tmp_path: Path) -> None:
    found = made_of(
        tmp_path,
        {"type": "token-producer", "parameters": {"modelName": "m", "vllm": {"url": "http://localhost:8000"}}},
        {"type": "precise-prefix-cache-producer", "parameters": {"tokenProcessorConfig": {"blockSize": 64}}},
        {
            "type": "prefix-cache-scorer",
            "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer", "matchLengthWeight": 0.5},
        },
        {"type": "no-hit-lru-scorer", "parameters": {"lruSize": 2048, "prefixPluginName": "prefix-cache-scorer"}},
        "single-profile-handler",
        profiles={"default": {"prefix-cache-scorer": 2, "no-hit-lru-scorer": 1}},
    )
    assert scorers(found) == [("PrecisePrefixCacheScorer", 2), ("NoHitLRUScorer", 1)]


@pytest.mark.parametrize(
    ("said", "blocks", "size"),
    [
        ({"maxPrefixTokensToMatch": 16384}, 256, 64),
        ({"maxPrefixTokensToMatch": 100_000, "blockSizeTokens": 128, "autoTune": False}, 781, 128),
        ({"maxPrefixTokensToMatch": 0, "maxPrefixBlocksToMatch": 99, "blockSizeTokens": 16}, 99, 64),
        ({}, 2048, 64),
    ],
)
def test_prefill_and_decode_with_a_producer(tmp_path: Path, said: dict[str, Any], blocks: int, size: int) -> None:
    uses = {"prefix-cache-scorer": 2, "queue-scorer": 1, "max-score-picker": 0}
    found = made_of(
        tmp_path,
        {"type": "approx-prefix-cache-producer", "parameters": {**said, "lruCapacityPerServer": 77}},
        "prefix-cache-scorer",
        "queue-scorer",
        "prefill-filter",
        "decode-filter",
        "max-score-picker",
        HANDLER,
        DECIDER,
        profiles={"prefill": {"prefill-filter": 0, **uses}, "decode": {"decode-filter": 0, **uses}},
    )
    assert found.decider == PrefixBasedDecider(non_cached_tokens=16)
    scorer = found.profiles["decode"].scorers[0][0]
    assert scorer == PrefixCacheScorer(block_size=size, max_prefix_blocks_to_match=blocks, lru_capacity_per_server=77)


@pytest.mark.parametrize(
    "parameters",
    [
        {"decodeProfile": "d", "prefillProfile": "p", "deciderPluginName": "always-disagg-pd-decider"},
        {"profiles": {"decode": "d", "prefill": "p"}, "deciders": {"prefill": "always-disagg-pd-decider"}},
        {"decodeProfile": "d", "prefillProfile": "p", "prefillDeciderPluginName": "always-disagg-pd-decider"},
    ],
)
@pytest.mark.parametrize("kind", ["pd-profile-handler", "disagg-profile-handler"])
def test_handlers_in_their_older_forms(tmp_path: Path, parameters: dict[str, Any], kind: str) -> None:
    found = made_of(
        tmp_path, {"type": kind, "parameters": parameters}, "always-disagg-pd-decider", profiles={"d": {}, "p": {}}
    )
    assert (found.by_role["decode"], found.by_role["prefill"], found.decider) == ("d", "p", AlwaysDisaggregate())


def test_without_a_decider_nobody_else_prefills(tmp_path: Path) -> None:
    profiles = {"prefill": {"prefill-filter": 0}, "decode": {"decode-filter": 0}}
    found = made_of(tmp_path, "prefill-filter", "decode-filter", "disagg-profile-handler", profiles=profiles)
    assert list(found.profiles) == ["decode"]
    assert set(found.by_role.values()) == {"decode"}


@pytest.mark.parametrize(
    "sections",
    [
        {"saturationDetector": {"pluginRef": "full"}},
        {"flowControl": {"maxRequests": "1k", "saturationDetector": {"pluginRef": "full"}}},
    ],
)
def test_when_an_engine_has_no_room(tmp_path: Path, sections: dict[str, Any]) -> None:
    detector = {
        "type": "utilization-detector",
        "name": "full",
        "parameters": {"queueDepthThreshold": 9, "kvCacheUtilThreshold": 0.5, "metricsStalenessThreshold": "150ms"},
    }
    found = made_of(tmp_path, "random-picker", detector, featureGates=["flowControl"], **sections)
    assert found.saturation == Saturation(queue_depth_threshold=9, kv_cache_util_threshold=0.5)


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        (
            {"maxConcurrency": 132, "concurrencyMode": "requests", "headroom": 0.0},
            ConcurrencyLimit(max_concurrency=132),
        ),
        (
            {"concurrencyMode": "hybrid", "maxTokenConcurrency": 5000, "inFlightLoadProducerName": "p"},
            ConcurrencyLimit(concurrency_mode="hybrid", max_token_concurrency=5000),
        ),
        ({}, ConcurrencyLimit()),
    ],
)
def test_when_all_engines_together_have_no_room(
    tmp_path: Path, parameters: dict[str, Any], limit: ConcurrencyLimit
) -> None:
    detector = {"type": "concurrency-detector", "parameters": parameters}
    flow = {"saturationDetector": {"pluginRef": "concurrency-detector"}, "priorityBands": [{"priority": 100}]}
    found = made_of(tmp_path, "queue-scorer", detector, profiles={"default": {"queue-scorer": 2}}, flowControl=flow)
    assert found.saturation == limit
    unnamed = made_of(tmp_path, "queue-scorer", detector, profiles={"default": {"queue-scorer": 2}})
    assert unnamed.saturation is None


@pytest.mark.parametrize(
    ("detector", "parameters", "expected"),
    [
        (
            "utilization-detector",
            {"headroom": 0.2},
            SaturationFilter(queue_depth_threshold=5, kv_cache_util_threshold=math.nextafter(0.96, 0)),
        ),
        (
            "utilization-detector",
            {"queueDepthThreshold": 5, "kvCacheUtilThreshold": 1},
            SaturationFilter(queue_depth_threshold=4, kv_cache_util_threshold=math.nextafter(1, 0)),
        ),
        (
            "concurrency-detector",
            {"maxConcurrency": 10, "headroom": 0.25},  # fewer than 12
            UtilizationFilter(conditions=(UtilizationCondition("active-requests", 11),)),
        ),
    ],
)
def test_a_detector_in_a_profile_is_a_filter(
    tmp_path: Path, detector: str, parameters: dict[str, Any], expected: object
) -> None:
    given = {"type": detector, "name": "full", "parameters": parameters}
    used = made_of(tmp_path, "queue-scorer", given, profiles={"default": {"full": 0, "queue-scorer": 1}})
    assert used.profiles["default"].filters == [expected]
    assert made_of(tmp_path, "queue-scorer", given).profiles["default"].filters == [expected]
    unused = made_of(tmp_path, "queue-scorer", given, profiles={"default": {"queue-scorer": 1}})
    assert not unused.profiles["default"].filters


@pytest.mark.parametrize(
    ("detector", "parameters", "field"),
    [
        ("concurrency-detector", {"concurrencyMode": "tokens"}, "concurrencyMode"),
        ("concurrency-detector", {"maxConcurrency": "many"}, "maxConcurrency"),
        ("utilization-detector", {"headroom": -1}, "headroom"),
        ("utilization-detector", {"kvCacheUtilThreshold": [1]}, "kvCacheUtilThreshold"),
    ],
)
def test_a_detector_that_is_no_filter_here_is_refused(
    tmp_path: Path, detector: str, parameters: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest, match=rf"plugins\[1\]\.parameters\.{field}: "):
        made_of(tmp_path, "queue-scorer", {"type": detector, "parameters": parameters})


def test_the_sessions_of_agents(tmp_path: Path) -> None:
    own = {"type": "agent-identity", "parameters": {"additionalSessionHeaders": ["X-Mine"]}}
    found = made_of(tmp_path, "queue-scorer", own)
    assert found.fairness_headers == ("x-mine", *AGENT_HEADERS)
    assert not made_of(tmp_path, "queue-scorer").fairness_headers
    with pytest.raises(BadRequest, match=r"plugins\[0\]\.parameters\.additionalSessionHeaders\[0\]: "):
        made_of(tmp_path, {"type": "agent-identity", "parameters": {"additionalSessionHeaders": [7]}})


@pytest.mark.parametrize("parameters", [{"ttftSource": "latencyPredictor"}, {"ttftSource": "by ear"}])
def test_affinity_by_predicted_latency_is_refused(tmp_path: Path, parameters: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"plugins\[0\].parameters.ttftSource: .*no predictor"):
        made_of(tmp_path, {"type": "prefix-cache-affinity-filter", "parameters": parameters})
    unused = {"type": "prefix-cache-affinity-filter", "parameters": {**parameters, "maxTTFTPenaltyMs": 0}}
    made_of(tmp_path, unused)


def test_room_in_its_oldest_form_and_none(tmp_path: Path) -> None:
    old = made_of(tmp_path, "random-picker", saturationDetector={"queueDepthThreshold": 7})
    assert old.saturation == Saturation(queue_depth_threshold=7)
    assert made_of(tmp_path, "random-picker").saturation is None


def test_sessions_labels_and_thresholds(tmp_path: Path) -> None:
    found = made_of(
        tmp_path,
        {"type": "session-affinity-scorer", "parameters": {"encodedEndpointHeaderConfig": {"header": "X-Mine"}}},
        {"type": "session-affinity-scorer", "name": "old", "parameters": {"headerName": "x-old"}},
        {
            "type": "session-affinity-scorer",
            "name": "by-id",
            "parameters": {"strategy": "session_id", "sessionIdConfig": {"evictionTtlSeconds": 300}},
        },
        {
            "type": "label-selector-filter",
            "parameters": {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]},
        },
        {"type": "active-request-scorer", "parameters": {"idleThreshold": 2, "maxBusyScore": 0.5}},
    )
    profile = found.profiles["default"]
    assert [scorer for scorer, _ in profile.scorers] == [
        SessionAffinityScorer(header="x-mine"),
        SessionAffinityScorer(header="x-old"),
        SessionAffinityScorer(header="x-session-id"),
        ActiveRequestScorer(idle_threshold=2, max_busy_score=0.5),
    ]
    wanted = LabelExpression("gpu", "In", frozenset({"h100"}))
    assert profile.filters == [ByLabelSelector(match_expressions=(wanted,))]


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_would_pick_otherwise_is_refused_with_its_reason(tmp_path: Path, kind: str) -> None:
    with pytest.raises(BadRequest, match=rf"plugins\[1\]\.type: {kind} of llm-d is not supported: ") as refused:
        made_of(tmp_path, "random-picker", kind)
    assert refused.value.message.endswith(REFUSED[kind])


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"primaryPort": 8000}, "primaryPort"),
        ({"stageOrder": "prefill-first"}, "stageOrder"),
        ({"deciders": {"encode": "x"}}, "deciders.encode"),
        ({"decider": "x"}, "decider"),
    ],
)
def test_handlers_that_pick_otherwise_are_refused(tmp_path: Path, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        made_of(tmp_path, {"type": "disagg-profile-handler", "parameters": parameters}, profiles={"decode": {}})


def test_every_type_has_one_line() -> None:
    tables = [READ, PASSED_OVER, REFUSED]
    kinds = [kind for table in tables for kind in table]
    assert len(kinds) == len(set(kinds))
    several = {CONTEXT_LENGTH, *DETECTOR_SECTIONS}
    assert {RENAMED_TYPES.get(kind, kind) for kind in READ} - several <= set(BUILT_IN)
    assert not (set(PASSED_OVER) | set(REFUSED)) & set(BUILT_IN)
    assert {RENAMED_TYPES.get(kind, kind) for kind, _ in PARAMETERS} <= {
        *BUILT_IN, *DETECTOR_SECTIONS.values()
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(PASSED_OVER))
def test_what_needs_no_plugin_changes_nothing(tmp_path: Path, kind: str) -> None:
    bare, with_it = made_of(tmp_path, "queue-scorer"), made_of(tmp_path, "queue-scorer", kind)
    assert with_it.profiles == bare.profiles


# ---- deciders, weights, and where errors are -----------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters", [None, {}, {"nonCachedTokens": 0}, {"nonCachedTokens": None}, {"promptTokens": 5}]
)
@pytest.mark.parametrize("kind", ["disagg-profile-handler", "pd-profile-handler"])
def test_without_a_number_of_missing_tokens_nobody_else_prefills(
    tmp_path: Path, parameters: dict[str, Any] | None, kind: str
) -> None:
    name = {"deciders": {"prefill": "prefix-based-pd-decider"}} if kind.startswith("disagg") else {}
    decider = {"type": "prefix-based-pd-decider", **({} if parameters is None else {"parameters": parameters})}
    handler = {"type": kind, "parameters": name}
    profiles = {"decode": {"decode-filter": None}, "prefill": {"prefill-filter": None}}
    found = made_of(tmp_path, "decode-filter", "prefill-filter", decider, handler, profiles=profiles)
    bench = Bench(View("a"))
    for cached in (0, 5, 640):
        assert not found.decider.disaggregates(request_of(*range(640)), cached, bench.engines)


@pytest.mark.parametrize(
    "plugin",
    ["decode-filter", "max-score-picker", "random-picker", "utilization-detector", "prefix-cache-affinity-filter"],
)
def test_a_weight_of_what_is_no_scorer_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plugin: str
) -> None:
    found = made_of(tmp_path, plugin, "queue-scorer", profiles={"default": {plugin: 5, "queue-scorer": 2}})
    assert [weight for _, weight in found.profiles["default"].scorers] == [2]
    assert any(f"weight of {plugin}" in record.getMessage() for record in caplog.records)


PASSED = {"type": "tokenizer"}
PRODUCER = {"type": "approx-prefix-cache-producer", "name": "p"}
USES_IT = {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "p"}}
FILE = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
DETECTOR_OF = {"type": "utilization-detector", "name": "d", "parameters": {"queueDepthThreshold": "many"}}


def uses(*names: str) -> list[dict[str, str]]:
    return [{"pluginRef": name} for name in names]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"plugins": [PASSED, PASSED | {"name": "u"}, {"type": "quue-scorer"}]}, "plugins[2].type"),
        ({"plugins": [PASSED, {"type": "queue-scorer", "parameters": {"x": 1}}]}, "plugins[1].parameters.x"),
        ({"plugins": [PASSED, {"type": "queue-scorer", "nme": 1}]}, "plugins[1].nme"),
        ({"plugins": [PASSED, {"type": "queue-scorer"}, {"type": "queue-scorer"}]}, "plugins[2].name"),
        ({"plugins": [PASSED, {"type": "context-length-aware", "parameters": {"enableFiltering": True}},
                      {"type": "quue-scorer"}]}, "plugins[2].type"),
        ({"plugins": [{"type": "single-profile-handler"}, PASSED, HANDLER]}, "plugins[2].type"),
        ({"plugins": [PASSED, {"type": "disagg-profile-handler",
                               "parameters": {"deciders": {"prefill": "nobody"}}}],
          "schedulingProfiles": [{"name": "decode"}, {"name": "prefill"}]}, "plugins[1].parameters.deciders.prefill"),
        ({"plugins": [PASSED, {"type": "pd-profile-handler", "parameters": {"deciderPluginName": "nobody"}}],
          "schedulingProfiles": [{"name": "decode"}, {"name": "prefill"}]}, "plugins[1].parameters.deciderPluginName"),
        # What is used, behind what is passed over, and in a profile behind one that is left out.
        ({"plugins": [PASSED, {"type": "queue-scorer"}],
          "schedulingProfiles": [{"name": "a", "plugins": uses("tokenizer", "queue-scorer", "nobody")}]},
         "schedulingProfiles[0].plugins[2].pluginRef"),
        ({"plugins": [PASSED, {"type": "disagg-profile-handler"}],
          "schedulingProfiles": [{"name": "prefill"}, {"name": "decode", "plugins": uses("tokenizer", "nobody")}]},
         "schedulingProfiles[1].plugins[1].pluginRef"),
        ({"plugins": [PASSED, {"type": "disagg-profile-handler"}],
          "schedulingProfiles": [{"name": "prefill"}, {"name": "decode", "x": 1}]}, "schedulingProfiles[1].x"),
        ({"plugins": [{"type": "random-picker"}, PASSED, {"type": "max-score-picker"}]}, "plugins[2].pluginRef"),
        # What is said of another plugin, or elsewhere.
        ({"plugins": [USES_IT, PASSED, PRODUCER | {"parameters": {"autTune": 1}}]}, "plugins[2].parameters.autTune"),
        ({"plugins": [PASSED, USES_IT, PRODUCER | {"parameters": {"lruCapacityPerServer": "x"}}]},
         "plugins[2].parameters.lruCapacityPerServer"),
        ({"plugins": [PASSED, USES_IT, PRODUCER | {"parameters": {"maxPrefixBlocksToMatch": -1}}]},
         "plugins[2].parameters.maxPrefixBlocksToMatch"),
        ({"plugins": [PASSED, {"type": "queue-scorer"}, DETECTOR_OF], "saturationDetector": {"pluginRef": "d"},
          "schedulingProfiles": [{"name": "a"}]}, "plugins[2].parameters.queueDepthThreshold"),
        ({"plugins": [PASSED], "flowControl": {"saturationDetector": {"queueDepthThreshold": "x"}},
          "schedulingProfiles": [{"name": "a"}]}, "flowControl.saturationDetector.queueDepthThreshold"),
        ({"plugins": [PASSED, {"type": "agent-identity", "parameters": {"additionalSessionHeaders": 5}}],
          "schedulingProfiles": [{"name": "a"}]}, "plugins[1].parameters.additionalSessionHeaders[0]"),
    ],
)  # fmt: skip
def test_an_error_names_the_place_in_the_file(tmp_path: Path, content: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as raised:
        load_scheduling(written(tmp_path, json.dumps({**FILE, **content})))
    assert raised.value.param == place
    assert f": {place}: " in raised.value.message
