"""Replacement of vLLM's methods: done in one way, once per process, and listed in :mod:`tercet.vllm_plugin.hooks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

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
