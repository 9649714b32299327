"""Translation of llm-d's ``EndpointPickerConfig`` to our scheduling file.

Parts are renamed, and unneeded ones removed. Each ignored part is logged on one line: it does not change which engine
is picked, or the line says how. Parts that would change picks and are not supported are refused with the reason.
The tables of plugins and of their parameters come first, the translation after them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from tercet.decisions.scheduling.assembly import is_of_llm_d
from tercet.protocol import BadRequest
from tercet.protocol.headers import AGENT_HEADERS

FLAT = {
    "decodeProfile": ("profiles", "decode"),
    "prefillProfile": ("profiles", "prefill"),
    "encodeProfile": ("profiles", "encode"),
    "deciderPluginName": ("deciders", "prefill"),
    "prefillDeciderPluginName": ("deciders", "prefill"),
    "encodeDeciderPluginName": ("deciders", "encode"),
}
"""A profile handler's parameters in their older form, and their places in the current form."""
DETECTOR, CONCURRENCY = "utilization-detector", "concurrency-detector"


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping; else an empty mapping."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return the value if it is a list; else an empty list."""
    return cast("list[Any]", value)


def detector_filter(kind: str, name: str, parameters: Mapping[str, Any], index: int) -> Any:
    """Return a detector as a filter: it keeps engines below its thresholds, which ``headroom`` raises."""
    at = f"plugins[{index}].parameters"
    raised = 1 + _number(parameters, "headroom", 0, at)
    if kind == DETECTOR:
        queue = raised * _number(parameters, "queueDepthThreshold", 5, at)
        cache = raised * _number(parameters, "kvCacheUtilThreshold", 0.8, at)
        most = {"queueDepthThreshold": _below(queue), "kvCacheUtilThreshold": min(1.0, math.nextafter(cache, 0))}
        return {"type": "saturation-filter", "name": name, "parameters": most}
    if parameters.get("concurrencyMode", "requests") != "requests":
        raise _wrong(f"{at}.concurrencyMode", "must be requests: a profile counts only requests")
    requests = int(raised * _number(parameters, "maxConcurrency", 100, at))
    condition = {"metric": "active-requests", "maxValue": _below(requests)}
    return {"type": "utilization-filter", "name": name, "parameters": {"conditions": [condition]}}


def _number(parameters: Mapping[str, Any], key: str, otherwise: float, at: str) -> float:
    """Return a parameter that is a number. Raises :class:`~tercet.protocol.BadRequest` for another value."""
    value = parameters.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _wrong(f"{at}.{key}", f"must be a number of 0 or more, is {value!r}")
    return value


def _wrong(at: str, why: str) -> BadRequest:
    return BadRequest(f"{at}: {why}", at)


def _below(limit: float) -> int:
    """Return the largest number below the limit."""
    return max(0, math.ceil(limit) - 1)


def load_gate(parameters: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the limits above which affinity costs too much: tokens in flight, for which llm-d has two names."""
    changed = dict(parameters)
    by = changed.pop("ttftSource", "prefillThroughput")
    if by != "prefillThroughput" and changed.get("maxTTFTPenaltyMs", 1):
        raise _wrong(f"plugins[{index}].parameters.ttftSource", f"{by}: {LATENCY}")
    if not changed.get("peakPrefillThroughput", 1):
        del changed["peakPrefillThroughput"]  # llm-d uses 0 for no limit
    return changed


def context_length(name: str, parameters: Mapping[str, Any]) -> list[Any]:
    """Return the plugins for one plugin of llm-d, which scores, and also filters if so configured."""
    others = dict(parameters)
    kinds = {name: "context-length-scorer"}
    if others.pop("enableFiltering", False):
        kinds[f"{name} (filter)"] = "context-length-filter"
    return [{"type": kind, "name": ours, "parameters": others} for ours, kind in kinds.items()]


def profile_handler(parameters: Mapping[str, Any], is_old: bool, index: int) -> Mapping[str, Any]:
    """Return a profile handler's parameters, from the flat form of older files or the current form."""
    at = f"plugins[{index}].parameters"
    flat = dict(parameters)
    if flat.pop("primaryPort", 0):
        raise _wrong(f"{at}.primaryPort", REFUSED["data-parallel-profile-handler"])
    if flat.get("stageOrder") == "prefill-first":
        raise _wrong(f"{at}.stageOrder", "prefill-first is not supported: the decode engine is picked first")
    profiles, deciders = dict(mapping_of(flat.get("profiles"))), dict(mapping_of(flat.get("deciders")))
    sections = {"profiles": profiles, "deciders": deciders}
    for old, (section, new) in FLAT.items():
        if value := flat.pop(old, None):
            sections[section][new] = value
    profiles.pop("encode", None)  # without a decider it is never used
    if deciders.get("encode"):
        raise _wrong(f"{at}.deciders.encode", REFUSED["encode-filter"])
    if is_old:
        deciders.setdefault("prefill", "prefix-based-pd-decider")
        for unused in ("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName"):
            flat.pop(unused, None)
    return {**flat, "profiles": profiles, "deciders": deciders}


def session(parameters: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the parameters with the header that names the session; of several sources, the first counts."""
    kept = dict(parameters)
    by_id = kept.pop("strategy", "encoded_endpoint_header") == "session_id"
    token = mapping_of(kept.pop("encodedEndpointHeaderConfig", None))
    named = mapping_of(kept.pop("sessionIdConfig", None))
    sources: Any = named.get("sources") or [{"header": "x-session-id"}]
    first = mapping_of(list_of(sources)[0] if isinstance(sources, list) else None)
    older = kept.pop("headerName", None)
    header = first.get("header") if by_id else token.get("header") or older
    if by_id and not header:
        why = "must name a header; sessions have their name in a header or in `user`"
        raise _wrong(f"plugins[{index}].parameters.sessionIdConfig", why)
    return {**kept, **({"header": str(header).lower()} if header else {})}


FLEET = "the fleet does this itself"
HEADERS = "the endpoint picker itself names the prefill engine"
REQUESTS = "requests of OpenAI's API are parsed; for others an engine is picked without their prompt"
TOKENS = "the prompt is tokenized according to --render-model"
TURNS = "requests of one priority take turns by their fairness id, and of one id first come, first served"
ENGINES = "the engines are those of --engine"

WITHOUT_GAPS = "counted in tokens, without gaps, and not rescaled: 0.1 is a tenth of the prompt"
SESSIONS = "sessions belong to engines by hashing: no cookie is sent, and no table is kept"
TIERS = "by labels only"
READ: Mapping[str, str] = {
    "active-request-scorer": "",
    "always-disagg-pd-decider": "",
    "by-label": "",
    "by-label-selector": "",
    "concurrency-detector": "where saturationDetector names it; in a profile by requests, as utilization-filter",
    "context-length-aware": "as context-length-scorer, and with enableFiltering as context-length-filter",
    "decode-filter": "by the engine's role, not by a label",
    "disagg-profile-handler": "no encode stage; the decode engine is picked first",
    "kv-cache-utilization-scorer": "",
    "label-selector-filter": "",
    "load-aware-scorer": "",
    "lora-affinity-scorer": "",
    "max-score-picker": "",
    "no-hit-lru-scorer": "",
    "pd-profile-handler": "as disagg-profile-handler; no primaryPort",
    "precise-prefix-cache-scorer": WITHOUT_GAPS,
    "prefill-filter": "by the engine's role, not by a label",
    "prefix-based-pd-decider": "",
    "prefix-cache-affinity-filter": WITHOUT_GAPS + "; tokens in flight are those that engines report",
    "prefix-cache-scorer": WITHOUT_GAPS + "; blocks have one size for all engines",
    "queue-scorer": "",
    "random-picker": "",
    "running-requests-size-scorer": "",
    "session-affinity-filter": SESSIONS,
    "session-affinity-scorer": SESSIONS,
    "single-profile-handler": "",
    "token-load-scorer": "tokens are those that engines report, not an estimate",
    "topology-affinity-filter": TIERS,
    "topology-affinity-scorer": TIERS,
    "utilization-detector": "where saturationDetector names it, and in a profile, as saturation-filter",
    "utilization-filter": "",
    "weighted-random-picker": "",
}
"""Supported types; the text says how they differ, or is empty."""

PASSED_OVER: Mapping[str, str] = {
    "agent-identity": "its headers name the flow of a request, if its fairness id does not",
    "anthropic-parser": REQUESTS,
    "approx-prefix-cache-producer": "its parameters go to the scorers and filters that use it",
    "core-metrics-extractor": FLEET,
    "disagg-headers-handler": HEADERS,
    "endpoint-notification-source": FLEET,
    "fcfs-ordering-policy": TURNS,
    "file-discovery": ENGINES,
    "global-strict-fairness-policy": TURNS,
    "inflight-load-producer": "requests in flight are those that engines report, and the latest picks",
    "k8s-notification-source": FLEET,
    "metrics-data-source": FLEET,
    "models-data-extractor": FLEET,
    "models-data-source": FLEET,
    "openai-parser": REQUESTS,
    "p2p-source-producer": "picks are the same; engines are not notified of another place to fetch KV from",
    "passthrough-parser": REQUESTS,
    "precise-prefix-cache-producer": "block sizes and hashes are those in engines' KV events",
    "prefill-header-handler": HEADERS,
    "request-attribute-reporter": "the endpoint picker does not see answers, and reports nothing about them",
    "round-robin-fairness-policy": TURNS,
    "served-model-filter": "an engine without the request's adapter is never picked",
    "session-id-producer": "session-affinity-scorer itself reads its header",
    "sglanghttp-parser": REQUESTS,
    "static-usage-limit-policy": "requests of all priorities are admitted while an engine has room",
    "token-producer": TOKENS,
    "tokenizer": TOKENS,
    "topology-extractor": "its labels go to the filter and the scorer that use it",
    "vertexai-parser": REQUESTS,
    "vllmhttp-parser": REQUESTS,
}

ENCODE = "there are no encode-only engines; leave the stage out"
LATENCY = "there is no predictor of latencies; the load that engines report, and the decider learned-cost, are similar"
LIMITS = "there is one limit for all priorities: an engine's room"
DEADLINES = "requests have no deadlines here"
PICTURES = "pictures are not distinguished"
CLUSTERS = "engines are picked, not clusters"
REVISIONS = "revisions are not separated: start one picker for each revision while both run"
LABELS = "write a plugin that uses engines' labels (docs/scheduling.md)"

RANKS = "each data parallel rank is an engine: list their ports with --engine"
FAIRNESS = "flows, by their fairness id, take turns with equal weights"
REFUSED: Mapping[str, str] = {
    "always-disagg-multimodal-decider": ENCODE,
    "burst-prefix-cache-producer": "requests do not wait for similar requests",
    "data-parallel-profile-handler": RANKS,
    "dcgm-data-source": LABELS,
    "dcgm-extractor": LABELS,
    "destination-endpoint-served-verifier": "it is a plugin for tests",
    "disaggregatedset-rollout-pod-extractor": REVISIONS,
    "disaggregatedset-rollout-screener": REVISIONS,
    "dp-rank-header-handler": RANKS,
    "edf-ordering-policy": DEADLINES,
    "encode-filter": ENCODE,
    "endpoint-attribute-filter": LABELS,
    "endpoint-attribute-scorer": LABELS,
    "header-based-testing-filter": "it is a plugin for tests",
    "header-label-affinity-scorer": LABELS,
    "header-profile-handler": "profiles are by role",
    "latency-scorer": LATENCY,
    "latency-slo-admitter": LATENCY,
    "local-syncer": "pickers see each other's requests in engines' reports",
    "lmetric-scorer": "prefixes and requests are scored apart, by prefix-cache-scorer and active-request-scorer",
    "mm-embeddings-cache-producer": PICTURES,
    "mm-embeddings-cache-scorer": PICTURES,
    "multicluster-approx-prefix-cache-producer": CLUSTERS,
    "multicluster-file-discovery": CLUSTERS,
    "multicluster-kv-cache-utilization-scorer": CLUSTERS,
    "multicluster-metrics-data-source": CLUSTERS,
    "multicluster-metrics-extractor": CLUSTERS,
    "multicluster-prefix-cache-scorer": CLUSTERS,
    "multicluster-queue-scorer": CLUSTERS,
    "multicluster-session-affinity-filter": CLUSTERS,
    "predicted-latency-producer": LATENCY,
    "priority-holdback-policy": LIMITS,
    "priority-then-time-eviction-order-policy": "running requests are not ended for others",
    "probabilistic-admitter": "a request that may be dropped is dropped when no engine has room, not by chance before",
    "program-aware-fairness": FAIRNESS,
    "sheddable-eviction-filter": "running requests are not ended for others",
    "slo-deadline-ordering-policy": DEADLINES,
    "slo-headroom-tier-filter": LATENCY,
    "soft-reflective-ceiling-policy": LIMITS,
    "thunder-agent": FAIRNESS,
    "vllmgrpc-parser": "engines are called by HTTP",
}

WAITING = "waiting is configured by --max-queued, --queue-timeout and --objective"
SECTIONS: Mapping[str, str] = {
    "data": FLEET,
    "dataLayer": FLEET,
    "featureGates": "the features that they switch are always on here, or not supported",
    "flowControl": WAITING,
    "parser": REQUESTS,
    "requestHandler": REQUESTS,
}

KV_EVENTS = "block sizes and hashes are those in engines' KV events"
DEPRECATED = "llm-d does not use it either"
PRODUCER = "the fleet keeps the data"
PARAMETERS: Mapping[tuple[str, str], str] = {
    ("active-request-scorer", "requestTimeout"): DEPRECATED,
    ("disagg-profile-handler", "stageOrder"): "the decode engine is picked first",
    ("no-hit-lru-scorer", "prefixMatchInfoProducerName"): "all prefix scorers of the profile count",
    ("no-hit-lru-scorer", "prefixPluginName"): "all prefix scorers of the profile count",
    ("no-hit-lru-scorer", "prefixPluginType"): "all prefix scorers of the profile count",
    ("precise-prefix-cache-scorer", "indexerConfig"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "kvEventsConfig"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "speculativeIndexing"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "speculativeTTL"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "tokenProcessorConfig"): KV_EVENTS,
    ("prefix-based-pd-decider", "prefixMatchInfoProducerName"): "matches of the decode profile's scorers count",
    **{
        (f"{kind}prefix-cache-affinity-filter", f"{data}ProducerName"): PRODUCER
        for kind in ("", "precise-")
        for data in ("inFlightLoad", "latencyPredictionInfo")
    },
    ("prefix-cache-scorer", "autoTune"): "blocks have the size blockSize",
    ("concurrencyDetector", "headroom"): "an engine has room while it is below the thresholds",
    ("concurrencyDetector", "inFlightLoadProducerName"): PRODUCER,
    ("saturationDetector", "headroom"): "an engine has room while it is below the thresholds",
    ("saturationDetector", "metricsStalenessThreshold"): "a report counts for 1 s",
    **dict.fromkeys(
        (("session-affinity-scorer", "profileName"), ("session-affinity-filter", "profileName")),
        "each profile has separate sessions",
    ),
    ("token-load-scorer", "inFlightLoadProducerName"): PRODUCER,
    ("active-request-scorer", "inFlightLoadProducerName"): PRODUCER,
    ("utilization-filter", "inFlightLoadProducerName"): PRODUCER,
    **{
        (kind, "maxNumOfEndpoints"): "--fallbacks sets the number of endpoints"
        for kind in ("max-score-picker", "random-picker", "weighted-random-picker")
    },
}
RENAMED: Mapping[tuple[str, str], str] = {("prefix-cache-scorer", "blockSizeTokens"): "blockSize"}
RENAMED_TYPES: Mapping[str, str] = {
    "label-selector-filter": "by-label-selector",
    "pd-profile-handler": "disagg-profile-handler",
}
# Parameters whose default in llm-d differs from the default here.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "prefill-filter": {"allowsBoth": False},
    "prefix-cache-affinity-filter": {"maxPrefixBlocksToMatch": 2048},
    "prefix-cache-scorer": {"maxPrefixBlocksToMatch": 2048},
}


_PART = re.compile(r"[^.\[\]]+|\[\d+\]")
APPROXIMATE, PRECISE = "approx-prefix-cache-producer", "precise-prefix-cache-producer"
SHORTEST_BLOCK = 64
"""Minimum block size in tokens: llm-d raises smaller block sizes of this producer to it."""
DETECTOR_SECTIONS = {DETECTOR: "saturationDetector", CONCURRENCY: "concurrencyDetector"}
TOPOLOGY, CONTEXT_LENGTH = "topology-extractor", "context-length-aware"
AGENTS = "agent-identity"
AFFINITY_FILTER = "prefix-cache-affinity-filter"
PREFIX_PLUGINS = ("prefix-cache-scorer", AFFINITY_FILTER)
# Parameters of the producer that belong here to the plugins that use it, with their names here.
OF_PRODUCERS = {
    "blockSize": "blockSize",
    "blockSizeTokens": "blockSize",
    "maxPrefixTokensToMatch": "maxPrefixBlocksToMatch",
}


def translated(content: Any) -> tuple[Any, list[str]]:
    """Return the content in our form, and the ignored parts; unchanged unless the file is one of llm-d.

    Raises :class:`~tercet.protocol.BadRequest` for unsupported parts that would change picks.
    """
    return _Translation(mapping_of(content)).result() if is_of_llm_d(content) else (content, [])


def as_in_file(content: Any, error: BadRequest) -> BadRequest:
    """Return an error about translated content with the place in the original file."""
    if not is_of_llm_d(content):
        return error
    made = _Translation(mapping_of(content))
    made.result()
    place, _, reason = error.message.partition(": ")
    for part in reversed(list(_PART.finditer(place))):  # the innermost place that is known
        there = made.places.get(place[: part.end()])
        if there is not None:
            place = there + place[part.end() :]
            return BadRequest(f"{place}: {reason}", place)
    return error


class _Translation:
    def __init__(self, original: Mapping[str, Any]) -> None:
        self.original = original
        self.notes: list[str] = []
        # Place in the original file of each part of the translated content; both places begin at the top.
        self.places: dict[str, str] = {}
        self.uses_of: list[list[str]] = []  # places of the plugins that each profile uses
        self.named: dict[str, list[str]] = {}  # translation of each plugin, by name
        self.entries = {_name(entry): mapping_of(entry) for entry in list_of(original["plugins"])}
        self.in_profiles = _used(original.get("schedulingProfiles") or [])

    def result(self) -> tuple[Any, list[str]]:
        sections = {key: value for key, value in self.original.items() if not self.noted(key, SECTIONS.get(key))}
        sections.pop("saturationDetector", None)
        kept = list[Any]()
        for index, entry in enumerate(list_of(self.original["plugins"])):
            made = self.plugins(entry, index)
            self.named[_name(entry)] = [_name(ours) for ours in made]
            for ours in range(len(kept), len(kept) + len(made)):
                self.places[f"plugins[{ours}]"] = f"plugins[{index}]"
                for key, place in self.borrowed(entry, index).items():
                    self.places[f"plugins[{ours}].parameters.{key}"] = place
            kept += made
        content = {
            **sections,
            **self.saturation(),
            **self.fairness(),
            "plugins": kept,
            "schedulingProfiles": (profiles := self.profiles()),
        }
        content = _without_stage(content)
        for ours, profile in enumerate(content["schedulingProfiles"]):
            index = next(index for index, each in enumerate(profiles) if each is profile)
            self.places[f"schedulingProfiles[{ours}]"] = f"schedulingProfiles[{index}]"
            for use, place in enumerate(self.uses_of[index]):
                self.places[f"schedulingProfiles[{ours}].plugins[{use}]"] = place
        return content, self.notes

    def borrowed(self, entry: Any, index: int) -> dict[str, str]:
        """Return the original places of the plugin's parameters that come from another plugin, or were renamed."""
        given = mapping_of(entry)
        own = mapping_of(given.get("parameters"))
        at = f"plugins[{index}].parameters"
        found = {f"{section}.{new}": f"{at}.{old}" for old, (section, new) in FLAT.items() if old in own}
        if given.get("type") in PREFIX_PLUGINS:
            at, theirs = self.parameters_of(own.get("prefixMatchInfoProducerName", APPROXIMATE))
            found |= {key: f"{at}.{key}" for key in theirs if key not in own}
            found |= {ours: f"{at}.{key}" for key, ours in OF_PRODUCERS.items() if key in theirs and ours not in own}
        if given.get("type") in ("topology-affinity-scorer", "topology-affinity-filter"):
            found["labels"] = self.parameters_of(own.get("topologyProducerName", TOPOLOGY))[0]
        return found

    def parameters_of(self, name: Any) -> tuple[str, Mapping[str, Any]]:
        """Return the place of a plugin's parameters, and the parameters."""
        return f"{self.place_of(name)}.parameters", mapping_of(self.entries.get(str(name), {}).get("parameters"))

    def place_of(self, name: Any) -> str:
        names = [_name(entry) for entry in list_of(self.original["plugins"])]
        return f"plugins[{names.index(str(name))}]" if str(name) in names else "plugins"

    def noted(self, what: str, why: str | None) -> bool:
        """Return True if the part is ignored, and note that."""
        if why is not None:
            self.notes.append(f"{what}: {why}")
        return why is not None

    # ---- plugins ---------------------------------------------------------------------------------------------

    def plugins(self, entry: Any, index: int) -> list[Any]:
        """Return the plugin in our form: none if it is not needed, two for a plugin that filters and scores."""
        given = mapping_of(entry)
        kind = str(given.get("type"))
        if kind in REFUSED:
            raise _wrong(f"plugins[{index}].type", f"{kind} of llm-d is not supported: {REFUSED[kind]}")
        if self.noted(kind, PASSED_OVER.get(kind)):
            return []
        parameters = mapping_of(given.get("parameters"))
        if not given or (not parameters and given.get("parameters")):
            return [entry]  # the reader of the result reports errors in it
        name = _name(given)
        kind = RENAMED_TYPES.get(kind, kind)
        if kind in DETECTOR_SECTIONS:
            in_one = name in self.in_profiles or not self.original.get("schedulingProfiles")
            return [detector_filter(kind, name, parameters, index)] if in_one else []
        if kind == CONTEXT_LENGTH:
            return context_length(name, parameters)
        if kind in PREFIX_PLUGINS:
            kind, parameters = self.prefix_plugin(kind, parameters, index)
        elif kind == "disagg-profile-handler":
            parameters = profile_handler(parameters, given.get("type") == "pd-profile-handler", index)
        elif kind in ("session-affinity-scorer", "session-affinity-filter"):
            parameters = session(parameters, index)
        elif kind in ("topology-affinity-scorer", "topology-affinity-filter"):
            parameters = self.topology(parameters)
        kept = {
            RENAMED.get((kind, key), key): value
            for key, value in parameters.items()
            # In Go, null means not given.
            if value is not None and not self.noted(f"{kind}.{key}", PARAMETERS.get((kind, key)))
        }
        return [{**given, "type": kind, "name": name, "parameters": {**DEFAULTS.get(kind, {}), **kept}}]

    def topology(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters, with the labels of the plugin's producer."""
        own = dict(parameters)
        producer = self.entries.get(str(own.pop("topologyProducerName", TOPOLOGY)), {})
        labels = dict(mapping_of(producer.get("parameters")))
        if "hostname" in labels:
            labels["host"] = labels.pop("hostname")
        return {**own, **({"labels": labels} if labels else {})}

    def prefix_plugin(self, kind: str, parameters: Mapping[str, Any], index: int) -> tuple[str, Mapping[str, Any]]:
        """Return the plugin with its producer's parameters; for blocks that engines report, another plugin here."""
        own = {key: value for key, value in parameters.items() if key != "prefixMatchInfoProducerName"}
        if kind == AFFINITY_FILTER:
            own = load_gate(own, index)
        producer = self.entries.get(str(parameters.get("prefixMatchInfoProducerName", APPROXIMATE)), {})
        if producer.get("type") == PRECISE:
            return f"precise-{kind}", own
        given = dict(mapping_of(producer.get("parameters")))
        if given.pop("autoTune", None) is not None:
            self.notes.append(f"{APPROXIMATE}.autoTune: blocks have the size blockSizeTokens")
        characters = given.pop("blockSize", None)
        block = given.pop("blockSizeTokens", characters // 4 if isinstance(characters, int) else None)
        size = max(SHORTEST_BLOCK, block) if isinstance(block, int) else SHORTEST_BLOCK
        most = given.pop("maxPrefixTokensToMatch", None)
        if isinstance(most, int) and most > 0:
            given["maxPrefixBlocksToMatch"] = max(1, most // size)
        return kind, {**({} if block is None else {"blockSize": size}), **given, **own}

    # ---- sections --------------------------------------------------------------------------------------------

    def saturation(self) -> Mapping[str, Any]:
        """Return the saturation section: the section itself, or the plugin that it names; empty without one."""
        flow = mapping_of(self.original.get("flowControl"))
        section = dict(mapping_of(flow.get("saturationDetector") or self.original.get("saturationDetector")))
        name = str(section.pop("pluginRef", DETECTOR))
        detector = self.entries.get(name, {})
        at, own = self.parameters_of(name)
        section.update(own)
        ours = DETECTOR_SECTIONS.get(str(detector.get("type", DETECTOR)))
        if ours is None or not (section or detector):
            return {}  # another detector is refused as a plugin
        self.places[ours] = "flowControl.saturationDetector" if flow.get("saturationDetector") else "saturationDetector"
        self.places.update({f"{ours}.{key}": f"{at}.{key}" for key in own})
        return {
            ours: {
                key: value
                for key, value in section.items()
                if not self.noted(f"{ours}.{key}", PARAMETERS.get((ours, key)))
            }
        }

    def fairness(self) -> Mapping[str, Any]:
        """Return the headers of agents' sessions, or an empty mapping if they are not used."""
        agents = [name for name, entry in self.entries.items() if entry.get("type") == AGENTS]
        if not agents:
            return {}
        at, parameters = self.parameters_of(agents[0])
        self.places["fairnessHeaders"] = f"{at}.additionalSessionHeaders"
        own: Any = parameters.get("additionalSessionHeaders") or []
        named = list_of(own if isinstance(own, list) else [own])  # the reader of the result reports errors in it
        return {"fairnessHeaders": [*(n.lower() if isinstance(n, str) else n for n in named), *AGENT_HEADERS]}

    def profiles(self) -> list[Any]:
        """Return the profiles, with their translated plugins; one of all plugins if the file has none."""
        given = self.original.get("schedulingProfiles")
        if given:
            return [self.profile(profile, f"schedulingProfiles[{n}]") for n, profile in enumerate(list_of(given))]
        unused = ("-handler", "-decider")
        names = [name for name, entry in self.entries.items() if not str(entry.get("type")).endswith(unused)]
        all_of_them = [{"pluginRef": name} for name in names]
        made = self.profile({"name": "default", "plugins": all_of_them}, "")
        self.uses_of = [[self.place_of(use["pluginRef"]) for use in all_of_them for _ in self.named[use["pluginRef"]]]]
        return [made]

    def profile(self, profile: Any, at: str) -> Any:
        fields = mapping_of(profile)
        if not isinstance(fields.get("plugins"), list):
            self.uses_of.append([])
            return profile
        uses = [(f"{at}.plugins[{n}]", ours) for n, use in enumerate(fields["plugins"]) for ours in self.uses(use)]
        self.uses_of.append([place for place, _ in uses])
        return {**fields, "plugins": [ours for _, ours in uses]}

    def uses(self, use: Any) -> list[Any]:
        """Return a profile's use of a plugin in our form; the weight belongs to the scorer, which comes first."""
        fields = mapping_of(use)
        ours = self.named.get(str(fields.get("pluginRef")))
        if ours is None:  # the reader of the result reports errors in it
            return [use]
        return [{**fields, "pluginRef": name} if name == ours[0] else {"pluginRef": name} for name in ours]


def _without_stage(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content with the decode profile only, if no decider is named: llm-d then never disaggregates."""
    handlers = [p for p in list_of(content["plugins"]) if mapping_of(p).get("type") == "disagg-profile-handler"]
    if len(handlers) != 1:
        return content
    parameters = mapping_of(handlers[0]["parameters"])
    if mapping_of(parameters.get("deciders")).get("prefill") or set(parameters) != {"profiles", "deciders"}:
        return content  # the reader of the result reports errors in other forms
    decode = str(mapping_of(parameters["profiles"]).get("decode", "decode"))
    single = {"type": "single-profile-handler", "name": _name(handlers[0])}
    plugins = [single if plugin is handlers[0] else plugin for plugin in content["plugins"]]
    profiles = [profile for profile in content["schedulingProfiles"] if mapping_of(profile).get("name") == decode]
    return {**content, "plugins": plugins, "schedulingProfiles": profiles}


def _used(profiles: Any) -> set[str]:
    """Return the names of plugins that profiles use; the reader of the result reports errors in profiles."""
    lists = [mapping_of(profile).get("plugins") for profile in list_of(profiles)]
    uses = [use for plugins in lists if isinstance(plugins, list) for use in list_of(plugins)]
    return {str(mapping_of(use).get("pluginRef")) for use in uses}


def _name(entry: Any) -> str:
    fields = mapping_of(entry)
    return str(fields.get("name") or fields.get("type"))
