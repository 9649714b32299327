"""Lets vLLM's second model runner, which it takes on GPUs, run on CPUs: its Triton kernels are interpreted.

vLLM's CPU build takes it where Triton has a backend for CPUs. Interpreted kernels need none, so one is named here that
does nothing. Python reads this file when it starts, if its folder is in ``PYTHONPATH``; nothing of it is used else.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Backend:
    """What vLLM looks for, and does not use."""

    compiler = None

    class driver:
        """Of no device."""

        @staticmethod
        def is_active() -> bool:
            """No kernel goes to it."""
            return False


def name_a_backend(backends: Any) -> None:
    """As a build of Triton with one for CPUs has it."""
    backends.backends["cpu"] = Backend


def take_masks_of_numbers(interpreter: Any) -> None:
    """Compilers take numbers for masks, and the interpreter does not."""
    builder = interpreter.InterpreterBuilder
    store, load = builder.create_masked_store, builder.create_masked_load

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *how: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, *how)

    def masked_load(self: Any, ptrs: Any, mask: Any, *how: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, ptrs, mask, *how)

    builder.create_masked_store, builder.create_masked_load = masked_store, masked_load


class After(MetaPathFinder):
    """Does something to a module once it has been imported."""

    def __init__(self, module: str, then: Callable[[Any], None]) -> None:
        self._module, self._then, self._looking = module, then, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:  # fmt: skip
        if fullname != self._module or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [
    After("triton.backends", name_a_backend),
    After("triton.runtime.interpreter", take_masks_of_numbers),
]
