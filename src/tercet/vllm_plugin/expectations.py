"""Expectations on third-party code. Each is tested by reading the code: the code is not called.

A ``target`` is ``"package.module:Name"`` or ``"package.module:Class.method"``. An expectation's ``unmet()`` is empty if
the expectation is met; otherwise it describes what is missing, for the person who installed the wrong version.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from functools import cache
from typing import Any, Protocol


class Expectation(Protocol):
    """A condition on the installed code."""

    def unmet(self) -> str:
        """Return a description of what is missing; empty if the expectation is met."""
        ...


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
        """Return what is missing: see :class:`Expectation`."""
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


class Says(_Targeted):
    """A function's or class's source contains these pieces of code, in this order; white space does not count."""

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
        """Return what is missing: see :class:`Expectation`."""
        found = [expectation.unmet() for expectation in self.expectations]
        return " and ".join(found) if all(found) else ""


def _parameters(function: Any) -> set[str]:
    # A wrapper of a vLLM function has the parameters of that function.
    wrapped = getattr(function, "__wrapped__", None)
    return {*inspect.signature(function, follow_wrapped=False).parameters, *(_parameters(wrapped) if wrapped else ())}


@cache  # some functions are checked two dozen times, and Python reads all tokens of a function to find its end
def _source(found: Any) -> str:
    return _squeezed(inspect.getsource(found))


def _squeezed(code: str) -> str:
    return "".join(code.split())
