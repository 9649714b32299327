"""An ``EndpointPickerConfig`` of llm-d as a scheduling file of ours: what is called otherwise, or needs no plugin.

What is passed over is said, one line each: nothing of it changes which engine is picked, or how is said there. What
would change it, and is not there, is refused with the reason. :mod:`.llm_d_plugins` has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tercet.protocol import BadRequest
from tercet.scheduling.llm_d_plugins import (
    AGENT_HEADERS,
    DEFAULTS,
    LATENCY,
    PARAMETERS,
    PASSED_OVER,
    REFUSED,
    RENAMED,
    RENAMED_TYPES,
    SECTIONS,
)

API_GROUPS = ("inference.networking.", "llm-d.ai/")
APPROXIMATE, PRECISE = "approx-prefix-cache-producer", "precise-prefix-cache-producer"
SHORTEST_BLOCK = 64
"""Tokens: llm-d takes smaller blocks of this producer for that."""
DETECTOR, CONCURRENCY = "utilization-detector", "concurrency-detector"
DETECTOR_SECTIONS = {DETECTOR: "saturationDetector", CONCURRENCY: "concurrencyDetector"}
TOPOLOGY, CONTEXT_LENGTH = "topology-extractor", "context-length-aware"
AGENTS = "agent-identity"
AFFINITY_FILTER = "prefix-cache-affinity-filter"
PREFIX_PLUGINS = ("prefix-cache-scorer", AFFINITY_FILTER)


def translated(content: Any) -> tuple[Any, list[str]]:
    """The file's content in our words, and what was passed over; as it is, if it is none of llm-d's.

    Raises :class:`~tercet.protocol.BadRequest` for what would change picks and is not there.
    """
    told = _mapping(content)
    if not _is_of_llm_d(told):
        return content, []
    return _Translation(told).result()


def _is_of_llm_d(told: Mapping[str, Any]) -> bool:
    profiles = told.get("schedulingProfiles")
    lists = isinstance(told.get("plugins"), list) and (profiles is None or isinstance(profiles, list))
    return lists and str(told.get("apiVersion")).startswith(API_GROUPS)


class _Translation:
    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told
        self.notes: list[str] = []
        self.named: dict[str, list[str]] = {}  # what became of each plugin, by names
        self.entries = {_name(entry): _mapping(entry) for entry in _list(told["plugins"])}

    def result(self) -> tuple[Any, list[str]]:
        sections = {key: value for key, value in self.told.items() if not self.noted(key, SECTIONS.get(key))}
        sections.pop("saturationDetector", None)
        kept = list[Any]()
        for index, entry in enumerate(_list(self.told["plugins"])):
            made = self.plugins(entry, index)
            self.named[_name(entry)] = [_name(ours) for ours in made]
            kept += made
        content = {
            **sections,
            **self.saturation(),
            **self.fairness(),
            "plugins": kept,
            "schedulingProfiles": self.profiles(),
        }
        return _without_stage(content), self.notes

    def noted(self, what: str, why: str | None) -> bool:
        """Whether it is passed over."""
        if why is not None:
            self.notes.append(f"{what}: {why}")
        return why is not None

    # ---- plugins ---------------------------------------------------------------------------------------------

    def plugins(self, entry: Any, index: int) -> list[Any]:
        """The plugin in our words: none if none is needed, two for one that filters and scores."""
        given = _mapping(entry)
        kind = str(given.get("type"))
        if kind in REFUSED:
            raise BadRequest(
                f"plugins[{index}].type: {kind} of llm-d is not there: {REFUSED[kind]}", f"plugins[{index}].type"
            )
        if self.noted(kind, PASSED_OVER.get(kind)):
            return []
        parameters = _mapping(given.get("parameters"))
        if not given or (not parameters and given.get("parameters")):
            return [entry]  # what is wrong with it is said where it is read
        name = _name(given)
        kind = RENAMED_TYPES.get(kind, kind)
        if kind == CONTEXT_LENGTH:
            return _context_length(name, parameters)
        if kind in PREFIX_PLUGINS:
            kind, parameters = self.prefix_plugin(kind, parameters, index)
        elif kind == "disagg-profile-handler":
            parameters = _handler(parameters, given.get("type") == "pd-profile-handler", index)
        elif kind in ("session-affinity-scorer", "session-affinity-filter"):
            parameters = _session(parameters, index)
        elif kind in ("topology-affinity-scorer", "topology-affinity-filter"):
            parameters = self.topology(parameters)
        kept = {
            RENAMED.get((kind, key), key): value
            for key, value in parameters.items()
            if not self.noted(f"{kind}.{key}", PARAMETERS.get((kind, key)))
        }
        return [{**given, "type": kind, "name": name, "parameters": {**DEFAULTS.get(kind, {}), **kept}}]

    def topology(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters, with the labels that its producer says."""
        own = dict(parameters)
        producer = self.entries.get(str(own.pop("topologyProducerName", TOPOLOGY)), {})
        labels = dict(_mapping(producer.get("parameters")))
        if "hostname" in labels:
            labels["host"] = labels.pop("hostname")
        return {**own, **({"labels": labels} if labels else {})}

    def prefix_plugin(self, kind: str, parameters: Mapping[str, Any], index: int) -> tuple[str, Mapping[str, Any]]:
        """The plugin, with what its producer says; that of what engines say they hold is another one here."""
        own = {key: value for key, value in parameters.items() if key != "prefixMatchInfoProducerName"}
        if kind == AFFINITY_FILTER:
            own = _load_gate(own, index)
        producer = self.entries.get(str(parameters.get("prefixMatchInfoProducerName", APPROXIMATE)), {})
        if producer.get("type") == PRECISE:
            return f"precise-{kind}", own
        given = dict(_mapping(producer.get("parameters")))
        if given.pop("autoTune", None) is not None:
            self.notes.append(f"{APPROXIMATE}.autoTune: blocks have the size that blockSizeTokens says")
        characters = given.pop("blockSize", None)
        block = given.pop("blockSizeTokens", characters // 4 if isinstance(characters, int) else None)
        size = max(SHORTEST_BLOCK, block) if isinstance(block, int) else SHORTEST_BLOCK
        most = given.pop("maxPrefixTokensToMatch", None)
        if isinstance(most, int) and most > 0:
            given["maxPrefixBlocksToMatch"] = max(1, most // size)
        return kind, {**({} if block is None else {"blockSize": size}), **given, **own}

    # ---- sections --------------------------------------------------------------------------------------------

    def saturation(self) -> Mapping[str, Any]:
        """When there is no room: the section itself, or the plugin that it names. Nothing if neither is there."""
        flow = _mapping(self.told.get("flowControl"))
        section = dict(_mapping(flow.get("saturationDetector") or self.told.get("saturationDetector")))
        detector = self.entries.get(str(section.pop("pluginRef", DETECTOR)), {})
        section.update(_mapping(detector.get("parameters")))
        ours = DETECTOR_SECTIONS.get(str(detector.get("type", DETECTOR)))
        if ours is None or not (section or detector):
            return {}  # another detector is refused as a plugin
        return {
            ours: {
                key: value
                for key, value in section.items()
                if not self.noted(f"{ours}.{key}", PARAMETERS.get((ours, key)))
            }
        }

    def fairness(self) -> Mapping[str, Any]:
        """The headers of agents' sessions, if they count."""
        agents = [entry for entry in self.entries.values() if entry.get("type") == AGENTS]
        if not agents:
            return {}
        own = _list(_mapping(agents[0].get("parameters")).get("additionalSessionHeaders") or [])
        named = own if isinstance(own, list) else [own]  # pyright: ignore[reportUnnecessaryIsInstance]
        return {"fairnessHeaders": [*(n.lower() if isinstance(n, str) else n for n in named), *AGENT_HEADERS]}

    def profiles(self) -> list[Any]:
        """The profiles, with what became of their plugins; one of all plugins if the file has none."""
        given = self.told.get("schedulingProfiles")
        if given:
            return [self.profile(profile) for profile in _list(given)]
        all_of_them = [{"pluginRef": name} for name in self.entries if not self.is_handler(name)]
        return [self.profile({"name": "default", "plugins": all_of_them})]

    def profile(self, profile: Any) -> Any:
        told = _mapping(profile)
        if not isinstance(told.get("plugins"), list):
            return profile
        return {**told, "plugins": [ours for use in _list(told["plugins"]) for ours in self.uses(use)]}

    def uses(self, use: Any) -> list[Any]:
        """What a profile's use of a plugin there is here; a weight is the scorer's, which is the first one."""
        told = _mapping(use)
        ours = self.named.get(str(told.get("pluginRef")))
        if ours is None:  # what is wrong with it is said where it is read
            return [use]
        return [{**told, "pluginRef": name} if name == ours[0] else {"pluginRef": name} for name in ours]

    def is_handler(self, name: str) -> bool:
        return str(self.entries[name].get("type")).endswith(("-handler", "-decider"))


def _handler(parameters: Mapping[str, Any], is_old: bool, index: int) -> Mapping[str, Any]:
    """A profile handler's parameters; in its older form they are flat."""
    at = f"plugins[{index}].parameters"
    flat = dict(parameters)
    if flat.pop("primaryPort", 0):
        raise BadRequest(f"{at}.primaryPort: {REFUSED['data-parallel-profile-handler']}", f"{at}.primaryPort")
    if flat.get("stageOrder") == "prefill-first":
        raise BadRequest(
            f"{at}.stageOrder: the decode engine is picked first, prefill-first is not there", f"{at}.stageOrder"
        )
    profiles, deciders = dict(_mapping(flat.get("profiles"))), dict(_mapping(flat.get("deciders")))
    for old, section, new in (
        ("decodeProfile", profiles, "decode"),
        ("prefillProfile", profiles, "prefill"),
        ("encodeProfile", profiles, "encode"),
        ("deciderPluginName", deciders, "prefill"),
        ("prefillDeciderPluginName", deciders, "prefill"),
        ("encodeDeciderPluginName", deciders, "encode"),
    ):
        if value := flat.pop(old, None):
            section[new] = value
    profiles.pop("encode", None)  # without a decider it is never used
    if deciders.get("encode"):
        raise BadRequest(f"{at}.deciders.encode: {REFUSED['encode-filter']}", f"{at}.deciders.encode")
    if is_old:
        deciders.setdefault("prefill", "prefix-based-pd-decider")
        for unused in ("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName"):
            flat.pop(unused, None)
    return {**flat, "profiles": profiles, "deciders": deciders}


def _without_stage(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where no decider is named, llm-d never has another engine prefill: then the decode profile is the only one."""
    handlers = [p for p in _list(content["plugins"]) if _mapping(p).get("type") == "disagg-profile-handler"]
    if len(handlers) != 1:
        return content
    told = _mapping(handlers[0]["parameters"])
    if _mapping(told.get("deciders")).get("prefill") or set(told) != {"profiles", "deciders"}:
        return content  # what is wrong with others is said where it is read
    decode = str(_mapping(told["profiles"]).get("decode", "decode"))
    single = {"type": "single-profile-handler", "name": _name(handlers[0])}
    plugins = [single if plugin is handlers[0] else plugin for plugin in content["plugins"]]
    profiles = [profile for profile in content["schedulingProfiles"] if _mapping(profile).get("name") == decode]
    return {**content, "plugins": plugins, "schedulingProfiles": profiles}


def _session(parameters: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Where the session's name is read from; of several places the first."""
    at = f"plugins[{index}].parameters"
    kept = dict(parameters)
    by_id = kept.pop("strategy", "encoded_endpoint_header") == "session_id"
    token, named = _mapping(kept.pop("encodedEndpointHeaderConfig", None)), _mapping(kept.pop("sessionIdConfig", None))
    sources = _list(named.get("sources") or [{"header": "x-session-id"}])
    header = _mapping(sources[0]).get("header") if by_id else token.get("header")
    if by_id and not header:
        raise BadRequest(f"{at}.sessionIdConfig: sessions are named by a header or by `user`", f"{at}.sessionIdConfig")
    return {**kept, **({"header": str(header).lower()} if header else {})}


def _context_length(name: str, parameters: Mapping[str, Any]) -> list[Any]:
    """One plugin there, which filters if it is told to, and scores."""
    told = dict(parameters)
    kinds = {name: "context-length-scorer"}
    if told.pop("enableFiltering", False):
        kinds[f"{name} (filter)"] = "context-length-filter"
    return [{"type": kind, "name": ours, "parameters": told} for ours, kind in kinds.items()]


def _load_gate(parameters: Mapping[str, Any], index: int) -> dict[str, Any]:
    """When affinity costs too much: by tokens in flight, for which there are two names of the limit."""
    told = dict(parameters)
    by = told.pop("ttftSource", "prefillThroughput")
    if by != "prefillThroughput" and told.get("maxTTFTPenaltyMs", 1):
        at = f"plugins[{index}].parameters.ttftSource"
        raise BadRequest(f"{at}: {by}: {LATENCY}", at)
    if not told.get("peakPrefillThroughput", 1):
        del told["peakPrefillThroughput"]  # llm-d takes 0 where there is no limit
    return told


def _name(entry: Any) -> str:
    told = _mapping(entry)
    return str(told.get("name") or told.get("type"))


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value, if it is one; else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value)
