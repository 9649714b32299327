"""The two ways in which Tercet changes vLLM's methods, all of them listed in :mod:`tercet.vllm_plugin.hooks`.

:func:`wrap` replaces a method in place, once per process. Where vLLM takes the name of a class, it is handed a subclass
instead (:func:`handed_in`), and its own class stays as it is.
"""

from __future__ import annotations

import functools
import pkgutil
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
