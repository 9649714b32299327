"""``tercet doctor``: check this machine for engines and routers, with the cost and the remedy of each finding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

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
    node of this machine. It starts no process, and takes as long as importing vLLM. The exit code is 0 if engines can
    be started here, even if slower than they could be, and 1 if they cannot.

    Examples:
    - `tercet doctor`
    - `tercet doctor --json`
    """
    from tercet.cluster.machine import findings_of, look_at_machine

    if not as_json:
        note("checking this machine; importing vLLM takes some seconds")
    machine = look_at_machine()
    findings, ray = findings_of(machine), []
    if "ray-nodes" in entry_points(PARTS):
        nodes = provided(PARTS, "ray-nodes", "ray", "tercet doctor")
        ray = nodes.ray_processes()
        findings += nodes.ray_findings(ray)
    if as_json:
        found = {
            "findings": msgspec.to_builtins(findings), "machine": msgspec.to_builtins(machine),
            "ray": msgspec.to_builtins(ray),
        }  # fmt: skip
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in in_words(findings):
            say(line)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def in_words(findings: Sequence[Finding]) -> Iterator[str]:
    """Return findings as lines; broken parts come last, next to the shell's prompt."""
    width = max(len(finding.part) for finding in findings)
    for state in MARKS:
        for finding in (each for each in findings if each.state == state):
            yield f"{MARKS[state]}  {finding.part:{width}}  {finding.found}"
            if finding.costs:
                yield f"{'':{len(MARKS[state])}}  {'':{width}}  costs: {finding.costs}"
            if finding.do:
                yield f"{'':{len(MARKS[state])}}  {'':{width}}  do: {finding.do}"
