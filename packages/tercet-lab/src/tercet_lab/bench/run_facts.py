"""The facts about the system and the settings of a point, from its file, as text. Points of one line have equal facts.

Requests per second, the number of users and the round distinguish the points of a line, and rounds may differ in their
seeds; these are not facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from tercet_lab.bench.results import BenchResult, Point

Facts = Mapping[str, str | None]
PROGRAM, SOURCE, MODEL, FLEET, WORKLOAD, ARRIVALS, MACHINE = (
    "program", "source", "model", "fleet", "workload", "arrivals", "machine",
)  # fmt: skip
# The most important facts: lines that differ in them have them in their labels.
FOREMOST = (SOURCE, MODEL, FLEET, WORKLOAD, ARRIVALS, MACHINE)
REAL, VIRTUAL, REAL_TIME = "real", "simulated", "simulated in real time"
SIMULATED_ENGINE = re.compile(r"\bsimulated (\S+)")
GROUP = re.compile(r"(prefill|decode|both)=(\d+)")
# Keys of a configuration that other facts contain, or that change no number.
SAID = {
    "workload", "arrival", "burstiness", "max-concurrency", "program", "fleet", "profile", "program_args", "rate",
    "request-rate", "concurrency", "seed", "base-url", "model", "label", "also", "baseline", "rounds", "confidence",
    "resamples", "save-detailed", "header", "over", "sweep",
}  # fmt: skip


def facts_of(result: BenchResult, point: Point) -> Facts:
    """Return all facts of a point, the most important first; None for a missing fact."""
    found = _simulated(result, point) if result.source == "sim" else _measured(result, point)
    versions = {"tercet": result.versions.get("tercet")}
    return {**found, **versions, **dict(_settings(result.config))}


def _measured(result: BenchResult, point: Point) -> Facts:
    config, target = result.config, _target_of(result, point)
    versions = [str(each) for each in target.get("engine_versions") or ()]
    own = str(_mapping(target.get("version")).get("version") or "")
    profiles = [each[1] for text in (*versions, own) if (each := SIMULATED_ENGINE.search(text))]
    real = ", ".join(versions) or own or None
    return {
        PROGRAM: _program_at(target, point.program),
        SOURCE: REAL_TIME if profiles else REAL,
        MODEL: ", ".join(dict.fromkeys(profiles)) or _text(target.get("model")),
        FLEET: _fleet_at(target),
        WORKLOAD: _phases(config.get("workload")),
        ARRIVALS: _arrivals(config.get("arrival"), config.get("burstiness"), point),
        MACHINE: _machine(result.machine),
        "server": urlsplit(str(target.get("base_url") or "")).hostname,
        "engines": None if profiles else real,
    }


def _simulated(result: BenchResult, point: Point) -> Facts:
    config: Mapping[str, Any] = result.config
    work = _mapping(config.get("workload"))
    return {
        PROGRAM: _called(point.program or point.label, config.get("program_args") or {}),
        SOURCE: VIRTUAL,
        MODEL: _text(config.get("profile") or result.target.get("model")),
        FLEET: _fleet(str(config.get("fleet") or "")),
        WORKLOAD: _phases(work.get("workload")) if "workload" in work else _lengths(work),
        ARRIVALS: _arrivals(work.get("arrivals"), work.get("burstiness"), point),
        MACHINE: None,
        # Two seeds of a simulation are two results: a simulation stores no requests that could be pooled.
        "seed": str(result.seed),
        "requests": _text(work.get("requests")),
        "warm-up": _text(work.get("warm_up")),
    }


def _target_of(result: BenchResult, point: Point) -> Mapping[str, Any]:
    """Return the facts of the point's server: the configured server, or another one in ``also``."""
    url = _mapping(result.config.get("also")).get(point.label) if point.program is None else None
    others: list[Mapping[str, Any]] = result.target.get("others") or []
    found = (other for other in others if url is not None and other.get("base_url") == str(url).rstrip("/"))
    return next(found, result.target)


def _program_at(target: Mapping[str, Any], asked: str | None) -> str | None:
    plan = _mapping(target.get("program"))
    if asked is not None:
        return _called(asked, plan.get("args") or {} if _name(plan) == asked else {})
    return program_served(target)


def program_served(target: Mapping[str, Any]) -> str | None:
    """Return the router's program for requests that name no program, or None for another kind of server."""
    plan = _mapping(target.get("program"))
    if shares := plan.get("split"):
        return " + ".join(f"{_called(_name(each), each.get('args') or {})} {each['weight']:g}" for each in shares)
    return _called(_name(plan), plan.get("args") or {}) if plan.get("program") else None


def _name(arm: Mapping[str, Any]) -> str:
    """Return the name of a program in the router's plan."""
    return str(arm.get("name") or arm.get("program"))


def _called(program: str, args: Mapping[str, Any]) -> str:
    return f"{program}({', '.join(f'{key}={value}' for key, value in args.items())})" if args else program


def _fleet_at(target: Mapping[str, Any]) -> str | None:
    roles = [str(_mapping(engine).get("role")) for engine in target.get("engines") or ()]
    return _fleet(",".join(f"{role}={roles.count(role)}" for role in ("prefill", "decode", "both") if role in roles))


def _fleet(text: str) -> str | None:
    """Return a fleet in its shortest form: ``1P1D``, ``both=2``, or the given text."""
    groups = [GROUP.fullmatch(part) for part in text.split(",")]
    roles = [group[1] for group in groups if group]
    if len(roles) == len(groups) and roles == ["prefill", "decode"]:
        return "".join(f"{group[2]}{group[1][0].upper()}" for group in groups if group)
    return text or None


def _phases(workload: Any) -> str | None:
    if isinstance(workload, str):
        return workload
    return ", then ".join(str(phase) for phase in workload) if workload else None


def _lengths(work: Mapping[str, Any]) -> str | None:
    if not work:
        return None
    into, out = (
        f"{work.get(f'{side}_mean', 0):g}{_deviation(work.get(f'{side}_dev', 0))}" for side in ("input", "output")
    )
    found = f"{into} tokens in, {out} out"
    found += f", {work['lengths']}" if work.get("lengths", "normal") != "normal" else ""
    return found + (f", {work['prefixes']} prefixes of {work['prefix']}" if work.get("prefixes") else "")


def _deviation(tokens: float) -> str:
    return f"±{tokens:g}" if tokens else ""


def _arrivals(kind: Any, burstiness: Any, point: Point) -> str | None:
    if kind is None:
        return None
    shape = f" {burstiness:g}" if kind == "gamma" else ""
    cap = f", at most {point.concurrency} at once" if point.request_rate is not None and point.concurrency else ""
    return f"{kind}{shape}{cap}"


def _machine(machine: Mapping[str, Any]) -> str | None:
    told = [str(machine[key]) + unit for key, unit in (("cpu", ""), ("cores", " cores")) if machine.get(key)]
    memory = machine.get("memory_gib")
    return ", ".join(told + ([f"{memory:.0f} GiB"] if memory else [])) or None


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the other settings that are set, as text."""
    for key, value in config.items():
        if key not in SAID and value is not None and value != {} and value != []:
            yield "SLO" if key in ("goodput", "slo") else key, _words(value)


def _words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return " ".join(f"{key}={item}" for key, item in _mapping(value).items() if item is not None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
