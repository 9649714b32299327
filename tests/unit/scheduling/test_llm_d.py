"""Files of llm-d: in its form, with what is a plugin there and none here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tercet.protocol import BadRequest
from tercet.scheduling import load_scheduling
from tercet.scheduling.filters import PrefillFilter
from tercet.scheduling.llm_d import translated
from tercet.scheduling.profiles import PrefixBasedDecider
from tercet.scheduling.scorers import PrefixCacheScorer

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


def written(directory: Path, text: str) -> Path:
    file = directory / "config.yaml"
    file.write_text(text)
    return file


def test_prefill_and_decode(tmp_path: Path) -> None:
    found = load_scheduling(written(tmp_path, HEAD + PD))
    assert found.by_role == {"prefill": "prefill", "decode": "decode", "both": "decode"}
    assert found.decider == PrefixBasedDecider(non_cached_tokens=20)
    prefill = found.profiles["prefill"]
    assert prefill.filters == [PrefillFilter(allows_both=False)]
    assert prefill.scorers == [(PrefixCacheScorer(block_size=32, lru_capacity_per_server=5000), 3.0)]


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tercet.scheduling"):
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
