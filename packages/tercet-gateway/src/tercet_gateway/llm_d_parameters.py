"""Parameters of llm-d's plugins in our form: renamed ones, and those that belong to another plugin here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from tercet.protocol import BadRequest
from tercet_gateway.llm_d_plugins import LATENCY, REFUSED

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
        raise BadRequest(
            f"{at}.concurrencyMode: must be requests: a profile counts only requests", f"{at}.concurrencyMode"
        )
    requests = int(raised * _number(parameters, "maxConcurrency", 100, at))
    condition = {"metric": "active-requests", "maxValue": _below(requests)}
    return {"type": "utilization-filter", "name": name, "parameters": {"conditions": [condition]}}


def _number(parameters: Mapping[str, Any], key: str, otherwise: float, at: str) -> float:
    """Return a parameter that is a number. Raises :class:`~tercet.protocol.BadRequest` for another value."""
    value = parameters.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadRequest(f"{at}.{key}: must be a number of 0 or more, is {value!r}", f"{at}.{key}")
    return value


def _below(limit: float) -> int:
    """Return the largest number below the limit."""
    return max(0, math.ceil(limit) - 1)


def load_gate(parameters: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the limits above which affinity costs too much: tokens in flight, for which llm-d has two names."""
    told = dict(parameters)
    by = told.pop("ttftSource", "prefillThroughput")
    if by != "prefillThroughput" and told.get("maxTTFTPenaltyMs", 1):
        at = f"plugins[{index}].parameters.ttftSource"
        raise BadRequest(f"{at}: {by}: {LATENCY}", at)
    if not told.get("peakPrefillThroughput", 1):
        del told["peakPrefillThroughput"]  # llm-d uses 0 for no limit
    return told


def context_length(name: str, parameters: Mapping[str, Any]) -> list[Any]:
    """Return the plugins for one plugin of llm-d, which scores, and also filters if so configured."""
    told = dict(parameters)
    kinds = {name: "context-length-scorer"}
    if told.pop("enableFiltering", False):
        kinds[f"{name} (filter)"] = "context-length-filter"
    return [{"type": kind, "name": ours, "parameters": told} for ours, kind in kinds.items()]


def profile_handler(parameters: Mapping[str, Any], is_old: bool, index: int) -> Mapping[str, Any]:
    """Return a profile handler's parameters, from the flat form of older files or the current form."""
    at = f"plugins[{index}].parameters"
    flat = dict(parameters)
    if flat.pop("primaryPort", 0):
        raise BadRequest(f"{at}.primaryPort: {REFUSED['data-parallel-profile-handler']}", f"{at}.primaryPort")
    if flat.get("stageOrder") == "prefill-first":
        raise BadRequest(
            f"{at}.stageOrder: prefill-first is not supported: the decode engine is picked first", f"{at}.stageOrder"
        )
    profiles, deciders = dict(mapping_of(flat.get("profiles"))), dict(mapping_of(flat.get("deciders")))
    sections = {"profiles": profiles, "deciders": deciders}
    for old, (section, new) in FLAT.items():
        if value := flat.pop(old, None):
            sections[section][new] = value
    profiles.pop("encode", None)  # without a decider it is never used
    if deciders.get("encode"):
        raise BadRequest(f"{at}.deciders.encode: {REFUSED['encode-filter']}", f"{at}.deciders.encode")
    if is_old:
        deciders.setdefault("prefill", "prefix-based-pd-decider")
        for unused in ("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName"):
            flat.pop(unused, None)
    return {**flat, "profiles": profiles, "deciders": deciders}


def session(parameters: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the parameters with the header that names the session; of several sources, the first counts."""
    at = f"plugins[{index}].parameters"
    kept = dict(parameters)
    by_id = kept.pop("strategy", "encoded_endpoint_header") == "session_id"
    token = mapping_of(kept.pop("encodedEndpointHeaderConfig", None))
    named = mapping_of(kept.pop("sessionIdConfig", None))
    sources: Any = named.get("sources") or [{"header": "x-session-id"}]
    first = mapping_of(list_of(sources)[0] if isinstance(sources, list) else None)
    older = kept.pop("headerName", None)
    header = first.get("header") if by_id else token.get("header") or older
    if by_id and not header:
        raise BadRequest(
            f"{at}.sessionIdConfig: must name a header; sessions have their name in a header or in `user`",
            f"{at}.sessionIdConfig",
        )
    return {**kept, **({"header": str(header).lower()} if header else {})}
