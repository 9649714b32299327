"""``tercet doctor``: check this machine for engines and routers, with the cost and the remedy of each finding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tercet.cli.terminal import note, say
from tercet.protocol.entry_points import PARTS, entry_points, provided

if TYPE_CHECKING:
    from tercet.cluster.machine import Finding

MARKS = {"ok": "ok    ", "costs": "costs ", "broken": "broken"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print findings, and the facts behind them, as JSON.")
    ] = False,
) -> None:
    """Check this machine for engines and routers, and print the cost and the remedy of each finding.

    The command checks vLLM and Tercet's hooks into it, devices, cores, memory, KV transports, limits, ports, and a Ray
    node of this machine. What needs no import of vLLM comes first, and that import, in a short-lived process, last. The
    exit code is 0 if engines can be started here, even if slower than they could be, and 1 if they cannot.

    Examples:
    - `tercet doctor`
    - `tercet doctor --json`
    """
    from tercet.cluster import machine as here

    nodes: Any = provided(PARTS, "ray-nodes", "ray", "tercet doctor") if "ray-nodes" in entry_points(PARTS) else None
    ray: list[Any] = [] if nodes is None else list(nodes.ray_processes())
    machine = here.look_at_machine() if as_json else here.look_at_once()
    findings = [*here.findings_of(machine), *(nodes.ray_findings(ray) if nodes is not None else ())]
    if as_json:
        found = {
            "findings": msgspec.to_builtins(findings), "machine": msgspec.to_builtins(machine),
            "ray": msgspec.to_builtins(ray),
        }  # fmt: skip
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in in_words(findings):
            say(line)
        if machine.vllm:  # last, and after the other findings are printed: the import of vLLM takes seconds
            note(f"importing vLLM to compare Tercet's hooks into it: some seconds, at most {here.HOOKS_SECONDS:.0f}")
            hooks = list(here.hook_findings(here.compare_hooks()))
            for line in in_words(hooks, max(len(finding.part) for finding in findings)):
                say(line)
            findings += hooks
    broken = [finding.part for finding in findings if finding.state == "broken"]
    if not as_json:
        say(f"broken: {', '.join(broken)}; engines cannot start here" if broken else "engines can start here")
    if broken:
        raise typer.Exit(1)


def in_words(findings: Sequence[Finding], least: int = 0) -> Iterator[str]:
    """Return findings as lines; broken parts come last. Parts have a column of at least ``least`` characters."""
    width = max(least, *(len(finding.part) for finding in findings))
    for state in MARKS:
        for finding in (each for each in findings if each.state == state):
            yield f"{MARKS[state]}  {finding.part:{width}}  {finding.found}"
            if finding.costs:
                yield f"{'':{len(MARKS[state])}}  {'':{width}}  costs: {finding.costs}"
            if finding.do:
                yield f"{'':{len(MARKS[state])}}  {'':{width}}  do: {finding.do}"
