"""Ways to import large libraries faster. An import creates hundreds of thousands of objects and no garbage."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def without_collections() -> Generator[None]:
    """Pause Python's garbage collector while entered, and exempt all objects that exist at the exit from collections.

    Collections would take a fifth of the time to import vLLM, and a first one afterwards nearly a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # These objects live as long as the process: later collections need not look at them.
        gc.freeze()
        if was_enabled:
            gc.enable()


def collect_rarely() -> None:
    """Exempt all objects that exist from garbage collections, and make these rare, in a server that has loaded.

    Requests leave few cycles, and a full collection of what a router has imported takes 50 ms.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@contextmanager
def frames_without_source() -> Generator[None]:
    """Make ``inspect.getframeinfo`` return no lines of source while entered.

    PyTorch calls it for each operator that it registers, and uses the file and the line number only. Python's own
    function searches all imported modules for the source: a twentieth of the time to import vLLM.
    """
    original = inspect.getframeinfo

    def place_of(frame: Any, context: int = 0) -> inspect.Traceback:
        return inspect.Traceback(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None)

    inspect.getframeinfo = place_of
    try:
        yield
    finally:
        inspect.getframeinfo = original


def import_late(name: str) -> None:
    """Make ``import NAME`` return at once; the module is imported when one of its attributes is first read.

    A module that is already imported stays. ``from NAME import x`` reads an attribute, so it imports the module.
    """
    if name not in sys.modules:
        sys.modules[name] = _LateModule(name)


class _LateModule(ModuleType):
    """A placeholder for a module. It imports the module, and copies its attributes, when an attribute is first read."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # read by the import system and by searches through all modules
            raise AttributeError(attribute)
        # Another thread may have imported it in the meantime.
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, attribute)
