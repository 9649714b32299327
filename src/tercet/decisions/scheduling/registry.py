"""Plugin classes by their type in a scheduling file, and the loader of the user's Python files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

from tercet.aio.files import read_whole
from tercet.decisions.scheduling import filters, labels, profiles, scorers
from tercet.decisions.scheduling.plugin import Decider, Filter, Picker, Plugin, Scorer
from tercet.protocol import BadRequest

BUILT_IN: Mapping[str, type[Plugin]] = {
    "active-request-scorer": scorers.ActiveRequestScorer,
    "always-disagg-pd-decider": profiles.AlwaysDisaggregate,
    "by-label": filters.ByLabel,
    "by-label-selector": filters.ByLabelSelector,
    "context-length-filter": labels.ContextLengthFilter,
    "context-length-scorer": labels.ContextLengthScorer,
    "decode-filter": filters.DecodeFilter,
    "disagg-profile-handler": profiles.DisaggProfileHandler,
    "health-filter": filters.HealthFilter,
    "kv-cache-utilization-scorer": scorers.KVCacheUtilizationScorer,
    "load-aware-scorer": scorers.LoadAwareScorer,
    "load-based-pd-decider": profiles.LoadBasedDecider,
    "lora-affinity-scorer": scorers.LoraAffinityScorer,
    "max-score-picker": profiles.MaxScorePicker,
    "no-hit-lru-scorer": scorers.NoHitLRUScorer,
    "power-of-two-picker": profiles.PowerOfTwoPicker,
    "precise-prefix-cache-affinity-filter": filters.PrecisePrefixCacheAffinityFilter,
    "precise-prefix-cache-scorer": scorers.PrecisePrefixCacheScorer,
    "prefill-filter": filters.PrefillFilter,
    "prefix-based-pd-decider": profiles.PrefixBasedDecider,
    "prefix-cache-affinity-filter": filters.PrefixCacheAffinityFilter,
    "prefix-cache-scorer": scorers.PrefixCacheScorer,
    "queue-scorer": scorers.QueueScorer,
    "random-picker": profiles.RandomPicker,
    "running-requests-size-scorer": scorers.RunningRequestsSizeScorer,
    "saturation-filter": filters.SaturationFilter,
    "session-affinity-filter": filters.SessionAffinityFilter,
    "session-affinity-scorer": scorers.SessionAffinityScorer,
    "single-profile-handler": profiles.SingleProfileHandler,
    "token-load-scorer": scorers.TokenLoadScorer,
    "topology-affinity-filter": labels.TopologyAffinityFilter,
    "topology-affinity-scorer": labels.TopologyAffinityScorer,
    "utilization-filter": filters.UtilizationFilter,
    "weighted-random-picker": profiles.WeightedRandomPicker,
}

_TO_WRITE = {Filter: "keep", Scorer: "score", Picker: "pick", Decider: "disaggregates"}


class Locate(Protocol):
    """A function that returns the file of a path if it may be read; :func:`user_file` allows any file."""

    def __call__(self, path: str, field: str, beside: Path = ..., /) -> Path:
        """Return the file; ``field`` is named in errors. Raises :class:`~tercet.protocol.TercetError`."""
        ...


def plugin_class(kind: str, beside: Path, field: str, locate: Locate | None = None) -> type[Plugin]:
    """Return the class that ``kind`` names: a built-in one, or that of ``file.py:Class``.

    Relative paths start from the folder ``beside``; ``field`` is the place in errors. Raises
    :class:`~tercet.protocol.BadRequest`.
    """
    found = BUILT_IN.get(kind)
    if found is not None:
        return found
    path, colon, name = kind.rpartition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise BadRequest(f"{field}: there is no plugin {kind!r}; choose one of {known}, or file.py:Class", field)
    file = (locate or user_file)(path, field, beside)
    return _checked(getattr(load_module(file, field), name, None), kind, field)


def _checked(found: object, kind: str, field: str) -> type[Plugin]:
    for base, method in _TO_WRITE.items():
        if isinstance(found, type) and issubclass(found, base):
            if getattr(found, method) is getattr(base, method):
                raise BadRequest(f"{field}: {kind} has no method {method}", field)
            return found
    bases = ", ".join(base.__name__ for base in _TO_WRITE)
    raise BadRequest(f"{field}: {kind} is not a class derived from one of tercet.decisions.scheduling's {bases}", field)


def user_file(path: str, field: str, beside: Path = Path()) -> Path:
    """Return the file that a user names; raise :class:`~tercet.protocol.BadRequest` if it does not exist.

    Only regular files are accepted: reading another kind may never end.
    """
    try:
        file = beside / Path(path).expanduser()
    except RuntimeError as error:  # an unknown user has no home folder
        raise BadRequest(f"{field}: {path}: {error}", field) from error
    try:
        is_file = file.is_file()
    except (OSError, ValueError) as error:  # no permission, or an impossible name
        raise BadRequest(f"{field}: {path!r} cannot be read: {getattr(error, 'strerror', error)}", field) from error
    if not is_file:
        raise BadRequest(f"{field}: there is no file {path}", field)
    return file


def load_module(file: Path, field: str, source: str | None = None) -> ModuleType:
    """Return the module of the file's current text; raise :class:`~tercet.protocol.BadRequest` that names ``field``.

    ``source`` is used instead of the file, which need not exist, unless it is None. The import system is not used: its
    cache may return a text that is up to a second old.
    """
    name = f"tercet_file_{file.absolute().as_posix()}"
    module, before = ModuleType(name), sys.modules.get(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and type hints look up their module
    try:
        exec(compile(read_whole(file) if source is None else source, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise BadRequest(f"{field}: {file} failed to load: {type(error).__name__}: {error}", field) from error
    return module
