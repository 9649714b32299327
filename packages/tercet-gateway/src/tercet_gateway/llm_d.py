"""Translation of llm-d's ``EndpointPickerConfig`` to our scheduling file.

Parts are renamed, and unneeded ones removed. Each ignored part is logged on one line: it does not change which engine
is picked, or the line says how. Parts that would change picks and are not supported are refused with the reason.
:mod:`.llm_d_plugins` has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tercet.decisions.scheduling.assembly import is_of_llm_d
from tercet.protocol import BadRequest
from tercet.protocol.headers import AGENT_HEADERS
from tercet_gateway.llm_d_parameters import (
    CONCURRENCY,
    DETECTOR,
    FLAT,
    context_length,
    detector_filter,
    list_of,
    load_gate,
    mapping_of,
    profile_handler,
    session,
)
from tercet_gateway.llm_d_plugins import (
    DEFAULTS,
    PARAMETERS,
    PASSED_OVER,
    REFUSED,
    RENAMED,
    RENAMED_TYPES,
    SECTIONS,
)

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
    told = mapping_of(content)
    if not is_of_llm_d(content):
        return content, []
    return _Translation(told).result()


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
    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told
        self.notes: list[str] = []
        # Place in the original file of each part of the translated content; both places begin at the top.
        self.places: dict[str, str] = {}
        self.uses_of: list[list[str]] = []  # places of the plugins that each profile uses
        self.named: dict[str, list[str]] = {}  # translation of each plugin, by name
        self.entries = {_name(entry): mapping_of(entry) for entry in list_of(told["plugins"])}
        self.in_profiles = _used(told.get("schedulingProfiles") or [])

    def result(self) -> tuple[Any, list[str]]:
        sections = {key: value for key, value in self.told.items() if not self.noted(key, SECTIONS.get(key))}
        sections.pop("saturationDetector", None)
        kept = list[Any]()
        for index, entry in enumerate(list_of(self.told["plugins"])):
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
        """Return the place of a plugin."""
        names = [_name(entry) for entry in list_of(self.told["plugins"])]
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
            raise BadRequest(
                f"plugins[{index}].type: {kind} of llm-d is not supported: {REFUSED[kind]}", f"plugins[{index}].type"
            )
        if self.noted(kind, PASSED_OVER.get(kind)):
            return []
        parameters = mapping_of(given.get("parameters"))
        if not given or (not parameters and given.get("parameters")):
            return [entry]  # the reader of the result reports errors in it
        name = _name(given)
        kind = RENAMED_TYPES.get(kind, kind)
        if kind in DETECTOR_SECTIONS:
            in_one = name in self.in_profiles or not self.told.get("schedulingProfiles")
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
        flow = mapping_of(self.told.get("flowControl"))
        section = dict(mapping_of(flow.get("saturationDetector") or self.told.get("saturationDetector")))
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
        given = self.told.get("schedulingProfiles")
        if given:
            return [self.profile(profile, f"schedulingProfiles[{n}]") for n, profile in enumerate(list_of(given))]
        all_of_them = [{"pluginRef": name} for name in self.entries if not self.is_handler(name)]
        made = self.profile({"name": "default", "plugins": all_of_them}, "")
        self.uses_of = [[self.place_of(use["pluginRef"]) for use in all_of_them for _ in self.named[use["pluginRef"]]]]
        return [made]

    def profile(self, profile: Any, at: str) -> Any:
        told = mapping_of(profile)
        if not isinstance(told.get("plugins"), list):
            self.uses_of.append([])
            return profile
        uses = [(f"{at}.plugins[{n}]", ours) for n, use in enumerate(told["plugins"]) for ours in self.uses(use)]
        self.uses_of.append([place for place, _ in uses])
        return {**told, "plugins": [ours for _, ours in uses]}

    def uses(self, use: Any) -> list[Any]:
        """Return a profile's use of a plugin in our form; the weight belongs to the scorer, which comes first."""
        told = mapping_of(use)
        ours = self.named.get(str(told.get("pluginRef")))
        if ours is None:  # the reader of the result reports errors in it
            return [use]
        return [{**told, "pluginRef": name} if name == ours[0] else {"pluginRef": name} for name in ours]

    def is_handler(self, name: str) -> bool:
        return str(self.entries[name].get("type")).endswith(("-handler", "-decider"))


def _without_stage(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content with the decode profile only, if no decider is named: llm-d then never disaggregates."""
    handlers = [p for p in list_of(content["plugins"]) if mapping_of(p).get("type") == "disagg-profile-handler"]
    if len(handlers) != 1:
        return content
    told = mapping_of(handlers[0]["parameters"])
    if mapping_of(told.get("deciders")).get("prefill") or set(told) != {"profiles", "deciders"}:
        return content  # the reader of the result reports errors in other forms
    decode = str(mapping_of(told["profiles"]).get("decode", "decode"))
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
    told = mapping_of(entry)
    return str(told.get("name") or told.get("type"))
