"""Assembly of a :class:`Scheduling` from a scheduling file.

The file is YAML in the form of llm-d's ``EndpointPickerConfig``, and read strictly.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta

from tercet.aio.files import read_whole
from tercet.decisions.scheduling import filters, profiles, scorers
from tercet.decisions.scheduling.plugin import Decider, Filter, Picker, Plugin, Scorer
from tercet.decisions.scheduling.profiles import (
    PICKER_NAMES,
    SCHEDULED,
    ConcurrencyLimit,
    Handler,
    MaxScorePicker,
    Saturation,
    Scheduling,
    SchedulingProfile,
    of_one_profile,
)
from tercet.protocol import BadRequest
from tercet.protocol.entry_points import PARTS, provided
from tercet.settings.declaration import complaint, load_yaml, parse_yaml

BUILT_IN: Mapping[str, type[Plugin]] = {
    "active-request-scorer": scorers.ActiveRequestScorer,
    "always-disagg-pd-decider": profiles.AlwaysDisaggregate,
    "by-label": filters.ByLabel,
    "by-label-selector": filters.ByLabelSelector,
    "context-length-filter": filters.ContextLengthFilter,
    "context-length-scorer": scorers.ContextLengthScorer,
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
    "topology-affinity-filter": filters.TopologyAffinityFilter,
    "topology-affinity-scorer": scorers.TopologyAffinityScorer,
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
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    path, colon, name = kind.rpartition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise BadRequest(f"{field}: there is no plugin {kind!r}; choose one of {known}, or file.py:Class", field)
    found = getattr(load_module((locate or user_file)(path, field, beside), field), name, None)
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


logger = logging.getLogger("tercet.decisions.scheduling")
T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1)]
# Of `apiVersion` in files of llm-d; they have some fields more than ours.
API_GROUPS = ("inference.networking.", "llm-d.ai/")
FairnessHeader = Annotated[str, Meta(min_length=1, pattern=r"^[a-z0-9_-]+\Z")]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class PluginEntry(_Strict, frozen=True):
    """One plugin: its type, its name in profiles (its type by default), and its parameters."""

    type: Name
    name: Name | None = None
    parameters: dict[str, Any] | None = None


class PluginUse(_Strict, frozen=True):
    """A plugin in a profile; ``weight`` is for scorers, 1 by default."""

    plugin_ref: Name
    weight: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None


class ProfileConfig(_Strict, frozen=True):
    """A profile; its filters run in the order of the file."""

    name: Name
    plugins: tuple[PluginUse, ...] = ()


class SchedulingConfig(_Strict, frozen=True):
    """The whole file."""

    plugins: tuple[PluginEntry, ...]
    scheduling_profiles: Annotated[tuple[ProfileConfig, ...], Meta(min_length=1)]
    api_version: str | None = None  # optional and ignored, as is the kind
    kind: Literal["EndpointPickerConfig"] | None = None
    # For an endpoint picker, the limits of each engine, or instead of them a limit of all engines together.
    saturation_detector: Saturation | None = None
    concurrency_detector: ConcurrencyLimit | None = None
    fairness_headers: tuple[FairnessHeader, ...] = ()  # lower case; the flow of a request without a fairness id

    def saturation(self) -> Saturation | ConcurrencyLimit | None:
        """Return the detector that is given, or None. Raise :class:`~tercet.protocol.BadRequest` if both are."""
        if self.saturation_detector is not None and self.concurrency_detector is not None:
            raise _wrong("concurrencyDetector", "give either this or saturationDetector")
        return self.saturation_detector or self.concurrency_detector


def convert(content: object, to: type[T], at: str) -> T:
    """Convert ``content`` to a record; ``at`` is its place in the file. Raise :class:`~tercet.protocol.BadRequest`."""
    try:
        return msgspec.convert(content, to)
    except msgspec.ValidationError as error:
        place, _, reason = complaint(at, to, content, error).message.partition(": ")
        if unknown := re.fullmatch("unknown key (.*?); (.*)", reason):
            place, reason = f"{place}.{unknown[1]}", f"there is no such field here; {unknown[2]}"
        place = place.lstrip(".") or "scheduling"
        raise BadRequest(f"{place}: {reason}", place) from error


def load_scheduling(path: Path, content: str | None = None, locate: Locate | None = None) -> Scheduling:
    """Load a scheduling file; the user's plugins are found relative to its folder.

    ``content`` is used instead of the file's text unless it is None. ``locate`` finds the files of plugins. Raises
    :class:`~tercet.protocol.BadRequest` that names the file and the invalid field.
    """
    name, is_file = f"scheduling: {path}", content is None
    written = load_yaml(path, name, "scheduling") if content is None else parse_yaml(content, name, "scheduling")
    try:
        if not is_of_llm_d(written):
            return _made(written, path, False, is_file, locate)
        llm_d = provided(PARTS, "llm-d", "gateway", "apiVersion")
        translated, passed_over = llm_d.translated(written)
        for line in passed_over:
            logger.warning("scheduling: %s of llm-d is ignored: %s", path.name, line)
        try:
            return _made(translated, path, True, is_file, locate)
        except BadRequest as error:
            raise llm_d.as_in_file(written, error) from error
    except BadRequest as error:
        raise BadRequest(f"scheduling: {path}: {error.message}", error.param) from error


def is_of_llm_d(content: object) -> bool:
    """Return True if the file is an ``EndpointPickerConfig`` of llm-d."""
    if not isinstance(content, Mapping):
        return False
    keys = cast("Mapping[str, Any]", content)
    profiles = keys.get("schedulingProfiles")
    lists = isinstance(keys.get("plugins"), list) and (profiles is None or isinstance(profiles, list))
    return lists and str(keys.get("apiVersion")).startswith(API_GROUPS)


def _made(content: object, path: Path, weighs_anything: bool, is_file: bool, locate: Locate | None) -> Scheduling:
    config, plugins = convert(content, SchedulingConfig, ""), dict[str, Plugin]()
    for index, entry in enumerate(config.plugins):
        at, name = f"plugins[{index}]", entry.name or entry.type
        if name in plugins:
            raise _wrong(f"{at}.name", f"another plugin is called {name!r} already; give this one a name")
        kind = plugin_class(entry.type, path.parent, f"{at}.type", locate)
        plugins[name] = convert(entry.parameters or {}, kind, f"{at}.parameters")
    assembled = dict[str, SchedulingProfile]()
    for index, given in enumerate(config.scheduling_profiles):
        at, name = f"schedulingProfiles[{index}]", given.name
        if name in assembled:
            raise _wrong(f"{at}.name", f"another profile is called {name!r} already")
        if name in PICKER_NAMES or name == SCHEDULED:
            raise _wrong(f"{at}.name", f"{name!r} is reserved by pick(); choose another name")
        assembled[name] = _profile(given, plugins, at, weighs_anything)
    deciders = {name: plugin for name, plugin in plugins.items() if isinstance(plugin, Decider)}
    handlers = [(index, plugin) for index, plugin in enumerate(plugins.values()) if isinstance(plugin, Handler)]
    if len(handlers) > 1:
        raise _wrong(f"plugins[{handlers[1][0]}].type", "is a second profile handler; keep one")
    if handlers:
        index, handler = handlers[0]
        scheduling = handler.assign(assembled, deciders, f"plugins[{index}].parameters")
    else:
        scheduling = of_one_profile(assembled, deciders)
    own = (plugin.type.rpartition(":")[0] for plugin in config.plugins)
    files = dict.fromkeys(path.parent / Path(file).expanduser() for file in own if file)
    return replace(
        scheduling, files=(*((path,) if is_file else ()), *files), saturation=config.saturation(),
        fairness_headers=config.fairness_headers,
    )  # fmt: skip


def _wrong(field: str, why: str) -> BadRequest:
    return BadRequest(f"{field}: {why}", field)


def _profile(given: ProfileConfig, plugins: Mapping[str, Plugin], at: str, weighs_anything: bool) -> SchedulingProfile:
    """Build the profile; a weight for a plugin that is not a scorer is an error, unless the file ``weighs_anything``.

    Files of llm-d have such weights.
    """
    used_filters, used_scorers, picker = list[Filter](), list[tuple[Scorer, float]](), None
    for index, use in enumerate(given.plugins):
        here = f"{at}.plugins[{index}]"
        plugin = plugins.get(use.plugin_ref)
        if plugin is None:
            known = ", ".join(plugins) or "none"
            why = f"there is no plugin {use.plugin_ref!r} under plugins; there are {known}"
            raise _wrong(f"{here}.pluginRef", why)
        if isinstance(plugin, Scorer):
            used_scorers.append((plugin, 1.0 if use.weight is None else use.weight))
            continue
        if use.weight is not None and weighs_anything:
            logger.warning("scheduling: the weight of %s is ignored: it is not a scorer", use.plugin_ref)
        elif use.weight is not None:
            raise _wrong(f"{here}.weight", f"{use.plugin_ref} is not a scorer; leave its weight out")
        if isinstance(plugin, Filter):
            used_filters.append(plugin)
        elif isinstance(plugin, Picker) and picker is None:
            picker = plugin
        else:
            why = "is the second picker" if isinstance(plugin, Picker) else "is not a filter, scorer or picker"
            raise _wrong(f"{here}.pluginRef", f"{use.plugin_ref} {why}")
    # Some scorers read what others have found, as the match of the prompt. Stable: the others keep their order.
    used_scorers.sort(key=lambda weighted: weighted[0].runs_last)
    return SchedulingProfile(given.name, used_filters, used_scorers, picker or MaxScorePicker())
