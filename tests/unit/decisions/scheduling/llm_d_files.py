"""Scheduling files in the form that llm-d publishes, of a test's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tercet.decisions.scheduling import Scheduling, load_scheduling

HANDLER = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}}


def written(directory: Path, text: str) -> Path:
    file = directory / "config.yaml"
    file.write_text(text)
    return file


def made_of(directory: Path, *plugins: Any, profiles: Any = None, **sections: Any) -> Scheduling:
    """A file with these plugins, types or mappings, all of which the only profile uses if none are given."""
    entries = [{"type": plugin} if isinstance(plugin, str) else plugin for plugin in plugins]
    content: dict[str, Any] = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": entries}
    if profiles is not None:
        content["schedulingProfiles"] = [
            {"name": name, "plugins": [{"pluginRef": ref, **({"weight": w} if w else {})} for ref, w in uses.items()]}
            for name, uses in profiles.items()
        ]
    return load_scheduling(written(directory, json.dumps({**content, **sections})))


def scorers(found: Scheduling, profile: str = "default") -> list[tuple[str, float]]:
    return [(type(scorer).__name__, weight) for scorer, weight in found.profiles[profile].scorers]
