"""How a method of vLLM is replaced: in one way, once per process, and listed in :mod:`tercet.vllm_plugin.hooks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

Method = Callable[..., Any]
MARK = "__tercet_wrapper__"


def wrap(owner: type | ModuleType, name: str, around: Method) -> None:
    """Let ``around(original, self, ...)`` stand in for ``owner.name``, which is ``original``; a module's has no self.

    A process may load the plugins more than once; a method that is wrapped already stays as it is.
    """
    original: Method = getattr(owner, name)
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)
