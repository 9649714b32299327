"""From a plugin's type, as a scheduling file names it, to its class; and the user's own Python files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from tercet.protocol import BadRequest
from tercet.scheduling.filters import (
    ByLabel,
    ByLabelSelector,
    DecodeFilter,
    HealthFilter,
    PrefillFilter,
    SaturationFilter,
)
from tercet.scheduling.pickers import MaxScorePicker, PowerOfTwoPicker, RandomPicker, WeightedRandomPicker
from tercet.scheduling.plugin import Decider, Filter, Picker, Plugin, Scorer
from tercet.scheduling.profiles import (
    AlwaysDisaggregate,
    DisaggProfileHandler,
    LoadBasedDecider,
    PrefixBasedDecider,
    SingleProfileHandler,
)
from tercet.scheduling.scorers import (
    ActiveRequestScorer,
    KVCacheUtilizationScorer,
    LoadAwareScorer,
    NoHitLRUScorer,
    PrecisePrefixCacheScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    SessionAffinityScorer,
    TokenLoadScorer,
)

BUILT_IN: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "active-request-scorer": ActiveRequestScorer,
        "always-disagg-pd-decider": AlwaysDisaggregate,
        "by-label": ByLabel,
        "by-label-selector": ByLabelSelector,
        "decode-filter": DecodeFilter,
        "disagg-profile-handler": DisaggProfileHandler,
        "health-filter": HealthFilter,
        "kv-cache-utilization-scorer": KVCacheUtilizationScorer,
        "load-aware-scorer": LoadAwareScorer,
        "load-based-pd-decider": LoadBasedDecider,
        "max-score-picker": MaxScorePicker,
        "no-hit-lru-scorer": NoHitLRUScorer,
        "power-of-two-picker": PowerOfTwoPicker,
        "precise-prefix-cache-scorer": PrecisePrefixCacheScorer,
        "prefill-filter": PrefillFilter,
        "prefix-based-pd-decider": PrefixBasedDecider,
        "prefix-cache-scorer": PrefixCacheScorer,
        "queue-scorer": QueueScorer,
        "random-picker": RandomPicker,
        "running-requests-size-scorer": RunningRequestsSizeScorer,
        "saturation-filter": SaturationFilter,
        "session-affinity-scorer": SessionAffinityScorer,
        "single-profile-handler": SingleProfileHandler,
        "token-load-scorer": TokenLoadScorer,
        "weighted-random-picker": WeightedRandomPicker,
    }
)

_TO_WRITE = {Filter: "keep", Scorer: "score", Picker: "pick", Decider: "disaggregates"}


def plugin_class(kind: str, beside: Path, field: str) -> type[Plugin]:
    """The class that ``kind`` names: a built-in one, or that of ``file.py:Class``.

    ``beside`` is the folder that relative paths start from, ``field`` the place that errors name. Raises
    :class:`~tercet.protocol.BadRequest`.
    """
    found = BUILT_IN.get(kind)
    if found is not None:
        return found
    path, colon, name = kind.rpartition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise BadRequest(f"{field}: there is no plugin {kind!r}; choose one of {known}, or file.py:Class", field)
    file = beside / Path(path).expanduser()
    if not file.is_file():
        raise BadRequest(f"{field}: there is no file {path}", field)
    return _checked(getattr(load_module(file, field), name, None), kind, field)


def _checked(found: object, kind: str, field: str) -> type[Plugin]:
    for base, method in _TO_WRITE.items():
        if isinstance(found, type) and issubclass(found, base):
            if getattr(found, method) is getattr(base, method):
                raise BadRequest(f"{field}: {kind} has no method {method}", field)
            return found
    bases = ", ".join(base.__name__ for base in _TO_WRITE)
    raise BadRequest(f"{field}: {kind} is not a class made from one of tercet.scheduling's {bases}", field)


def load_module(file: Path, field: str) -> ModuleType:
    """The file's module, from its text of now; raises :class:`~tercet.protocol.BadRequest` that names ``field``.

    Not through the import system: that may answer from its cache what a file contained less than a second ago.
    """
    name = f"tercet_file_{file.absolute().as_posix()}"
    module, before = ModuleType(name), sys.modules.get(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise BadRequest(f"{field}: {file} failed to load: {type(error).__name__}: {error}", field) from error
    return module
