"""A router's programs and scheduling file as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def state_in_words(state: dict[str, Any]) -> Iterator[str]:
    """Return lines about the programs in use and the previous version."""
    yield f"version {state['version']}: {_plan_in_words(state)}"
    for name, count in state["failures_in_a_row"].items():
        yield f"  {name} failed on its last {count} requests"
    if returned := state["returned"]:
        yield (
            f"  returned from version {returned['from_version']}: {returned['program']} failed {returned['failures']} "
            f"times in a row, the last time with {returned['error']}"
        )
    if before := state["previous"]:
        yield f"  before: version {before['version']}: {_plan_in_words(before)}"


def _plan_in_words(version: dict[str, Any]) -> str:
    shares: list[dict[str, Any]] = version.get("split") or [version]
    total = sum(share.get("weight", 1.0) for share in shares)
    words = [
        _arm_in_words(share) + (f" {share.get('weight', 1.0) / total:.1%}" if version.get("split") else "")
        for share in shares
    ]
    words += [f"{_arm_in_words(rule)} where {_condition(rule)}" for rule in version.get("rules", ())]
    return ", ".join(words)


def _arm_in_words(arm: dict[str, Any]) -> str:
    args = ", ".join(f"{key}={value}" for key, value in arm.get("args", {}).items())
    return f"{arm.get('name') or arm['program']}({args})" if args else arm.get("name") or arm["program"]


def _condition(rule: dict[str, Any]) -> str:
    header = f"{rule['header']}={rule['value']}" if "value" in rule else rule.get("header")
    model = f"model={rule['model']}" if "model" in rule else None
    return " and ".join(filter(None, (header, model)))


def scheduling_in_words(state: dict[str, Any]) -> Iterator[str]:
    """Return lines about the scheduling file in use and its profiles."""
    yield f"scheduling file: {state['file'] or 'none'}"
    for name, profile in state["profiles"].items():
        roles = [role for role, used in state["by_role"].items() if used == name]
        scorers = [f"{scorer} x {weight:g}" for scorer, weight in profile["scorers"].items()]
        parts = [*profile["filters"], *scorers, profile["picker"]]
        yield f"  {name} ({', '.join(roles) or 'no role'}): {', '.join(parts)}"
