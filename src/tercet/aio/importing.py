"""Imports of large libraries, which create hundreds of thousands of objects and no garbage."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def without_collections() -> Generator[None]:
    """Stop Python's garbage collector while entered: it takes a fifth of the time of importing vLLM."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_late(name: str) -> None:
    """Let ``import NAME`` succeed at once, and import the module when an attribute of it is read.

    A module that is imported already stays. ``from NAME import x`` reads an attribute, and imports it.
    """
    if name not in sys.modules:
        sys.modules[name] = _LateModule(name)


class _LateModule(ModuleType):
    """Stands for a module until an attribute of it is read, and then has all of its attributes."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # read by the import system and by searches through all modules
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, attribute)
