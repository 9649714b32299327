"""Roles and objectives of a running router as lines of text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


def roles_in_words(found: dict[str, Any]) -> Iterator[str]:
    """Return the router's answer about roles as lines."""
    yield objectives_in_words(found["objectives"])
    yield from classes_in_words(found["objectives"])
    by_role = {role: [name for name, its in found["engines"].items() if its == role] for role in ("prefill", "decode")}
    yield f"roles: {found['roles']}; " + "; ".join(f"{role}: {', '.join(by_role[role]) or 'none'}" for role in by_role)
    decision = found["decision"]
    if decision is None:
        return
    yield f"pressure: prefill {_share(decision['prefill_pressure'])}, decode {_share(decision['decode_pressure'])}"
    yield f"{max(0.0, time.time() - decision['at']):.1f} s ago: {decision['why']}"
    for flip in decision["flips"]:
        when = time.strftime("%H:%M:%S", time.localtime(flip["at"]))
        yield f"  {when}  {', '.join(flip['engines'])} -> {flip['role']}: {flip['reason']}"


def classes_in_words(objectives: dict[str, Any]) -> Iterator[str]:
    """Return a line for each class of requests."""
    for each in objectives.get("classes", ()):
        said = objectives_in_words(each).removeprefix("objectives: ")
        yield f"  {objectives['header']}: {each['name']}: {said}"


def objectives_in_words(objectives: dict[str, Any]) -> str:
    """Return the objectives, and the share of requests that met them, as a line."""
    limits = [f"{name.upper()} {objectives[name]:g} s" for name in ("ttft", "tpot") if objectives[name] is not None]
    if not limits:
        return "no objectives"
    said = f"objectives: {', '.join(limits)} for {objectives['share']:.1%} of the requests"
    if objectives["attainment"] is None:
        return f"{said}; no request has ended yet"
    return f"{said}; met by {objectives['attainment']:.1%} of {objectives['requests']}"


def _share(pressure: float | None) -> str:
    return "unknown" if pressure is None else f"{pressure:.0%}"
