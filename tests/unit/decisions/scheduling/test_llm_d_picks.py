"""Files of llm-d's forms pick what its formulas say, worked out by hand for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tercet.decisions.scheduling import Scheduling
from tercet.decisions.scheduling.plugin import Decision
from tercet.protocol import Request

from .builders import Bench, View, request_of
from .llm_d_files import made_of

PROMPT = request_of(*range(640))
"""Ten blocks of 64 tokens."""
OTHER = request_of(*range(10_000, 10_640))
ALWAYS = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}}


def order(
    found: Scheduling, bench: Bench, request: Request = PROMPT, profile: str = "default", partner: View | None = None
) -> str:
    """All engines that are left, from the best down."""
    decision = bench.decision(request)
    decision.partner = partner
    rows = found.profiles[profile].ranked(decision, bench.engines, len(bench.views))
    by_row = dict(zip(bench.knowledge.rows([view.name for view in bench.views]).tolist(), bench.views, strict=True))
    return "".join(by_row[row].name for row in rows)


def scores(
    found: Scheduling, bench: Bench, request: Request = PROMPT, profile: str = "default", partner: View | None = None
) -> dict[str, float]:
    decision: Decision = bench.decision(request)
    decision.partner = partner
    made = found.profiles[profile]._scores(decision, bench.engines)  # pyright: ignore[reportPrivateUsage]
    return {view.name: round(float(score), 4) for view, score in zip(bench.views, made, strict=True)}


def routed(bench: Bench, name: str, blocks: int, size: int = 64, capacity: int = 31_250) -> None:
    """The first blocks of the prompt were routed to that engine before."""
    hashes = bench.decision(PROMPT).hashes(size, 2048)[:blocks]
    bench.knowledge.routed(size, capacity).note(int(bench.knowledge.rows([name])[0]), hashes)


def test_the_charts_default(tmp_path: Path) -> None:
    """Queue 2, KV 2, prefix 3: a 2·1 + 2·0.1, b 2·0 + 2·0.9, c 2·0.5 + 2·0.5 and of the prefix 3·0.7."""
    found = made_of(
        tmp_path,
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "prefix-cache-scorer",
        profiles={"default": {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}},
    )
    bench = Bench(View("a"), View("b"), View("c"))
    for name, waiting, kv in (("a", 0, 0.9), ("b", 4, 0.1), ("c", 2, 0.5)):
        bench.report(name, waiting=waiting, kv=kv)
    assert scores(found, bench, OTHER) == {"a": 2.2, "b": 1.8, "c": 2.0}
    assert order(found, bench, OTHER) == "acb"
    routed(bench, "c", 7)
    assert scores(found, bench) == {"a": 2.2, "b": 1.8, "c": 4.1}
    assert order(found, bench) == "cab"


AFFINITY: Mapping[str, dict[str, Any]] = {
    "by time": {"peakPrefillThroughput": 33821},  # 18 s of it: 608778 tokens
    "by tokens": {"affinityThreshold": 0.8, "maxTokensInFlightPenalty": 608_778, "maxTTFTPenaltyMs": 0},
    "engines' own word": {
        "peakPrefillThroughput": 33821,
        "prefixMatchInfoProducerName": "precise-prefix-cache-producer",
    },
}


@pytest.mark.parametrize("kind", AFFINITY)
@pytest.mark.parametrize(
    ("blocks", "behind", "left"),
    [(8, 0, "a"), (8, 608_778, "a"), (8, 608_779, "ba"), (7, 0, "ab"), (0, 1, "ba")],
    ids=["sticky", "at the limit", "behind it", "too little", "nothing"],
)
def test_prefixes_hold_until_that_costs_too_much(
    tmp_path: Path, kind: str, blocks: int, behind: int, left: str
) -> None:
    """Who has at least 0.8 of the prompt is kept alone; then the token load picks, for a million and a half."""
    found = made_of(
        tmp_path,
        "inflight-load-producer",
        {"type": "approx-prefix-cache-producer", "parameters": {"maxPrefixTokensToMatch": 131072}},
        "precise-prefix-cache-producer",
        {"type": "prefix-cache-affinity-filter", "parameters": AFFINITY[kind]},
        "token-load-scorer",
        profiles={"default": {"prefix-cache-affinity-filter": 0, "token-load-scorer": 0}},
    )
    bench = Bench(View("a"), View("b"))
    if kind == "engines' own word":
        bench.knowledge.store("a", 64, list(range(blocks)), None, list(PROMPT.prompt[: 64 * blocks]))
    else:
        routed(bench, "a", blocks)
    bench.report("a", tokens=100 + behind)
    bench.report("b", tokens=100 if behind or blocks != 7 else 101)
    assert order(found, bench) == left


def test_a_prompt_stays_where_it_was_routed(tmp_path: Path) -> None:
    """The filter's producer notes what is routed, as a scorer does: without any scorer, too."""
    filtered = {"type": "prefix-cache-affinity-filter", "parameters": {"explorationProbability": 0}}
    found = made_of(tmp_path, filtered, profiles={"default": {"prefix-cache-affinity-filter": 0}})
    bench = Bench(View("a"), View("b"), View("c"))
    first = order(found, bench)[0]
    assert [order(found, bench) for _ in range(9)] == [first] * 9
    assert len(order(found, bench, OTHER)) == 3


def test_prefixes_hold_but_for_those_that_explore(tmp_path: Path) -> None:
    always = {"type": "prefix-cache-affinity-filter", "parameters": {"explorationProbability": 1}}
    found = made_of(tmp_path, always, profiles={"default": {"prefix-cache-affinity-filter": 0}})
    bench = Bench(View("a"), View("b"))
    routed(bench, "a", 10)
    assert set(order(found, bench)) == {"a", "b"}


def test_prefill_and_decode_by_affinity_and_load(tmp_path: Path) -> None:
    """The prefill profile as above; decoding goes to who has the fewest requests: (4 - n) / 4."""
    found = made_of(
        tmp_path,
        "always-disagg-pd-decider",
        ALWAYS,
        "prefill-filter",
        "decode-filter",
        {"type": "approx-prefix-cache-producer", "parameters": {"autoTune": False, "lruCapacityPerServer": 4_000_000}},
        "active-request-scorer",
        "token-load-scorer",
        {"type": "prefix-cache-affinity-filter", "parameters": {"peakPrefillThroughput": 9866}},
        "inflight-load-producer",
        profiles={
            "prefill": {"prefill-filter": 0, "token-load-scorer": 0, "prefix-cache-affinity-filter": 0},
            "decode": {"decode-filter": 0, "active-request-scorer": 0},
        },
    )
    bench = Bench(View("p", "prefill"), View("q", "prefill"), View("d", "decode", in_flight=4), View("e", "decode"))
    routed(bench, "p", 10, capacity=4_000_000)
    bench.report("p", tokens=100_000)  # 10.1 s behind, at most 18 are allowed
    assert order(found, bench, profile="prefill") == "p"
    bench.report("p", tokens=200_000)
    assert order(found, bench, profile="prefill") == "qp"
    assert order(found, bench, profile="decode") == "ed"


def test_lengths(tmp_path: Path) -> None:
    """640 tokens: of 0-2048 ``a`` gets 0.3 + 0.7·(0.7/1.2048 + 0.3·1408/2048), out of range 0.3/(1 + 1408/1000)."""
    aware = {"type": "context-length-aware", "parameters": {"label": "range", "enableFiltering": True}}
    found = made_of(tmp_path, aware, "queue-scorer", profiles={"default": {"context-length-aware": 1}})
    bench = Bench(
        View("a", labels={"range": "0-2048"}),
        View("b", labels={"range": "2048-8192"}),
        View("c"),
        View("d", labels={"range": "640-640"}),
        View("e", labels={"range": "few"}),
    )
    assert scores(found, bench) == {"a": 0.8511, "b": 0.1246, "c": 0.5, "d": 1.0, "e": 0.0}
    assert order(found, bench) == "dac"
    long = request_of(*range(10_000))
    assert scores(found, bench, long)["b"] == round(0.3 / (1 + 1808 / 1000), 4)
    assert order(found, bench, long) == "c"
    scored = {**aware, "parameters": {"label": "range"}}
    only_scores = made_of(tmp_path, scored, profiles={"default": {"context-length-aware": 1}})
    assert order(only_scores, bench)[:2] == "da"
    assert len(order(only_scores, bench)) == 5


def test_who_prefills_is_near_who_decodes(tmp_path: Path) -> None:
    """Queue 1, nearness 1: on the host 1 + 0, in the rack 0.2 + 1, elsewhere 0 + 0.5."""
    found = made_of(
        tmp_path,
        {"type": "topology-extractor", "parameters": {"hostname": "host", "rack": "rack"}},
        {"type": "topology-affinity-filter", "parameters": {"minAffinity": "rack"}},
        "topology-affinity-scorer",
        "queue-scorer",
        profiles={
            "filtered": {"topology-affinity-filter": 0, "topology-affinity-scorer": 1, "queue-scorer": 1},
            "scored": {"topology-affinity-scorer": 1, "queue-scorer": 1},
        },
    )
    decode = View("d", "decode", labels={"host": "h1", "rack": "r1"})
    bench = Bench(
        View("a", labels={"host": "h1", "rack": "r1"}),
        View("b", labels={"host": "h2", "rack": "r1"}),
        View("c", labels={"host": "", "topology.kubernetes.io/zone": "z"}),
    )
    for name, waiting in (("a", 4), ("b", 0), ("c", 2)):
        bench.report(name, waiting=waiting)
    assert scores(found, bench, profile="scored", partner=decode) == {"a": 1.0, "b": 1.2, "c": 0.5}
    assert order(found, bench, profile="filtered", partner=decode) == "ba"
    assert order(found, bench, profile="filtered") == "bca"  # nobody to be near to: the queue alone
    elsewhere = View("d", "decode", labels={"host": "h9"})
    assert order(found, bench, profile="filtered", partner=elsewhere) == "bca"


@pytest.mark.parametrize("strategy", ["session_id", "encoded_endpoint_header"])
def test_a_session_stays_on_its_engine(tmp_path: Path, strategy: str) -> None:
    header = "x-session-id" if strategy == "session_id" else "x-session-token"
    pinned = {"type": "session-affinity-filter", "parameters": {"strategy": strategy}}
    uses = {"default": {"session-affinity-filter": 0, "active-request-scorer": 1}}
    found = made_of(tmp_path, pinned, "active-request-scorer", profiles=uses)
    bench = Bench(View("a"), View("b"), View("c"))
    sessions = {f"s{n}": order(found, bench, request_of(1, 2, **{header: f"s{n}"})) for n in range(30)}
    assert set(sessions.values()) == {"a", "b", "c"}  # one each, and not all the same one
    bench.views[0].in_flight = 100
    assert {s: order(found, bench, request_of(1, 2, **{header: s})) for s in sessions} == sessions
    assert len(order(found, bench)) == 3


def test_two_tiers_of_one_cache(tmp_path: Path) -> None:
    """Both histories say that ``a`` has 0.5 of the prompt, and the queue that it is last: 0.5 + 0.5 + 0."""
    found = made_of(
        tmp_path,
        {"type": "approx-prefix-cache-producer", "name": "gpu"},
        {"type": "approx-prefix-cache-producer", "name": "cpu", "parameters": {"lruCapacityPerServer": 10_000}},
        "queue-scorer",
        {"type": "prefix-cache-scorer", "name": "g", "parameters": {"prefixMatchInfoProducerName": "gpu"}},
        {"type": "prefix-cache-scorer", "name": "c", "parameters": {"prefixMatchInfoProducerName": "cpu"}},
        "no-hit-lru-scorer",
        profiles={"default": {"queue-scorer": 0, "g": 0, "c": 0, "no-hit-lru-scorer": 0}},
    )
    bench = Bench(View("a"), View("b"))
    for capacity in (31_250, 10_000):
        routed(bench, "a", 5, capacity=capacity)
    bench.report("a", waiting=1)
    bench.report("b", waiting=0)
    assert scores(found, bench) == {"a": 0.5 + 0.5 + 0 + 0.5, "b": 0 + 0 + 1 + 0.5}


def test_every_rank_of_a_wide_model(tmp_path: Path) -> None:
    """Prefix 3, queue 2, requests 2: a 3·0.9 + 2·0 + 2·0.25, b 0 + 2·1 + 2·0.5, c 0 + 2·0.5 + 2·1 (idle)."""
    found = made_of(
        tmp_path,
        "prefix-cache-scorer",
        "queue-scorer",
        "active-request-scorer",
        profiles={"default": {"prefix-cache-scorer": 3, "queue-scorer": 2, "active-request-scorer": 2}},
    )
    bench = Bench(View("a", in_flight=3), View("b", in_flight=2), View("c"), View("d", in_flight=4))
    routed(bench, "a", 9)
    for name, waiting in (("a", 4), ("b", 0), ("c", 2), ("d", 4)):
        bench.report(name, waiting=waiting)
    assert scores(found, bench) == {"a": 3.2, "b": 3.0, "c": 3.0, "d": 0.0}
    assert order(found, bench)[0] == "a"


def test_the_least_requests_or_the_fewest_tokens(tmp_path: Path) -> None:
    """Load-aware 0.5·(1 - q/128); tokens 1 - t/4194304."""
    uses = {"default": {"load-aware-scorer": 1, "token-load-scorer": 1}}
    found = made_of(tmp_path, "load-aware-scorer", "token-load-scorer", "max-score-picker", profiles=uses)
    bench = Bench(View("a"), View("b"))
    bench.report("a", waiting=64, tokens=0)
    bench.report("b", waiting=0, tokens=2_097_152)
    assert scores(found, bench) == {"a": 0.25 + 1.0, "b": 0.5 + 0.5}
