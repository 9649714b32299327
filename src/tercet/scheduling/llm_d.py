"""An ``EndpointPickerConfig`` of llm-d as a scheduling file of ours: what is called otherwise, or needs no plugin.

What is passed over is said, one line each: nothing of it changes which engine is picked, or how is said there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

API_GROUPS = ("inference.networking.", "llm-d.ai/")
FLEET = "the fleet does that by itself"
# Plugins that produce data or write headers; here the fleet keeps the data, and the picker writes the headers.
NO_PLUGINS: Mapping[str, str] = {
    "approx-prefix-cache-producer": FLEET,
    "core-metrics-extractor": FLEET,
    "disagg-headers-handler": "the endpoint picker names the prefill engine by itself",
    "endpoint-notification-source": FLEET,
    "metrics-data-source": FLEET,
    "openai-parser": "the endpoint picker reads OpenAI requests by itself",
    "prefill-header-handler": "the endpoint picker names the prefill engine by itself",
    "token-producer": "tokens are made as --render-model says",
    "tokenizer": "tokens are made as --render-model says",
}
NO_SECTIONS: Mapping[str, str] = {"data": FLEET, "dataLayer": FLEET}
KV_EVENTS = "block sizes and hashes are what engines say in their KV events"
NO_PARAMETERS: Mapping[tuple[str, str], str] = {
    ("prefix-cache-scorer", "autoTune"): "blocks have the size that blockSize says",
    ("precise-prefix-cache-scorer", "indexerConfig"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "kvEventsConfig"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "tokenProcessorConfig"): KV_EVENTS,
    **{
        (kind, "maxNumOfEndpoints"): "--fallbacks says how many endpoints are named"
        for kind in ("max-score-picker", "random-picker", "weighted-random-picker")
    },
}
RENAMED: Mapping[tuple[str, str], str] = {("prefix-cache-scorer", "blockSizeTokens"): "blockSize"}
# What a parameter is in llm-d that is another one here if it is not given.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {"prefill-filter": {"allowsBoth": False}}


def translated(content: Any) -> tuple[Any, list[str]]:
    """The file's content in our words, and what was passed over; as it is, if it is none of llm-d's."""
    told = _mapping(content)
    if not _is_of_llm_d(told):
        return content, []
    passed_over: list[str] = []
    sections = {key: value for key, value in told.items() if not _noted(passed_over, key, NO_SECTIONS.get(key))}
    gone: set[str] = set()
    plugins: list[Any] = []
    for entry in _list(told["plugins"]):
        plugin = _mapping(entry)
        kind = str(plugin.get("type"))
        if _noted(passed_over, kind, NO_PLUGINS.get(kind)):
            gone.add(str(plugin.get("name") or kind))
        else:
            plugins.append(_plugin(plugin, kind, passed_over) if plugin else entry)
    profiles = [_without(profile, gone) for profile in _list(told["schedulingProfiles"])]
    return {**sections, "plugins": plugins, "schedulingProfiles": profiles}, passed_over


def _is_of_llm_d(told: Mapping[str, Any]) -> bool:
    lists = isinstance(told.get("plugins"), list) and isinstance(told.get("schedulingProfiles"), list)
    return lists and str(told.get("apiVersion")).startswith(API_GROUPS)


def _noted(passed_over: list[str], what: str, why: str | None) -> bool:
    if why is not None:
        passed_over.append(f"{what}: {why}")
    return why is not None


def _plugin(plugin: Mapping[str, Any], kind: str, passed_over: list[str]) -> Any:
    given = _mapping(plugin.get("parameters"))
    if not given and plugin.get("parameters"):
        return plugin  # what is wrong with it is said where it is read
    kept = {
        RENAMED.get((kind, key), key): value
        for key, value in given.items()
        if not _noted(passed_over, f"{kind}.{key}", NO_PARAMETERS.get((kind, key)))
    }
    return {**plugin, "parameters": {**DEFAULTS.get(kind, {}), **kept}}


def _without(profile: Any, gone: set[str]) -> Any:
    """A profile that does not use the plugins of these names."""
    told = _mapping(profile)
    if not isinstance(told.get("plugins"), list):
        return profile
    return {**told, "plugins": [use for use in _list(told["plugins"]) if _mapping(use).get("pluginRef") not in gone]}


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value, if it is one; else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value)
