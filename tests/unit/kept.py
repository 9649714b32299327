"""What a server keeps after requests: the containers that are reached from its objects, and their bytes."""

from __future__ import annotations

import enum
import gc
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

CONTAINERS = (list, dict, set, deque, OrderedDict, WeakValueDictionary)
WALKED = ("tercet.", "tercet_", "prometheus_client.")
"""Modules whose objects are looked into: those of Tercet, and metrics, whose labels clients may choose."""
SKIPPED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, types.CodeType, enum.Enum)


def parts_of(found: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, with the name of its attribute; not objects of libraries but metrics."""
    if isinstance(found, Mapping):
        yield from (("", each) for pair in list(found.items()) for each in pair)
    elif isinstance(found, (list, tuple, set, frozenset, deque)):
        yield from (("", each) for each in list(found))
    elif isinstance(found, partial):
        yield from (("", each) for each in (found.func, *found.args, *found.keywords.values()))
    elif isinstance(found, types.MethodType):
        yield "", found.__self__
    elif type(found).__module__.startswith(WALKED):
        slots = [slot for kind in type(found).__mro__ for slot in getattr(kind, "__slots__", ())]
        names = {*getattr(found, "__dict__", {}), *slots, *getattr(found, "__struct_fields__", ())}
        yield from ((name, getattr(found, name, None)) for name in names if not name.startswith("__"))


class Kept:
    """The bytes of all that is reached from ``roots``, and the length of each container, by class and attribute."""

    def __init__(self, *roots: Any) -> None:
        gc.collect()
        self.bytes = 0
        self.lengths = dict[str, int]()
        seen, left = set[int](), [("", root) for root in roots]
        while left:
            name, found = left.pop()
            if id(found) in seen or isinstance(found, SKIPPED):
                continue
            seen.add(id(found))
            self.bytes += sys.getsizeof(found)
            if name and isinstance(found, CONTAINERS):
                self.lengths[name] = self.lengths.get(name, 0) + len(found)
            # A container in a container counts for the attribute that has both.
            inner = name if isinstance(found, CONTAINERS) else ""
            kind = type(found).__name__
            left += [(f"{kind}.{attribute}" if attribute else inner, each) for attribute, each in parts_of(found)]

    def grown_since(self, before: Kept) -> set[str]:
        return {name for name, length in self.lengths.items() if length > before.lengths.get(name, 0)}
