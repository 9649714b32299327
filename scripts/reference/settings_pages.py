"""The pages of settings (of commands and engines) and of files with other forms."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from scripts.reference.markdown import code, first_sentence, prose, table

from tercet.cluster.up_config import UpConfig
from tercet.decisions.scheduling.assembly import BUILT_IN, PluginEntry, PluginUse, ProfileConfig, SchedulingConfig
from tercet.router.serve.plans import Plan, Rule, Share
from tercet.settings import Declared, EngineAddress, RouterConfig, RouterSettings, Settings, declared
from tercet.vllm_plugin.start.plugin_settings import PluginSettings
from tercet_bench.bench_config import BenchConfig, CompareConfig, ServeConfig
from tercet_checks.commands.chaos import ChaosConfig
from tercet_gateway.gateway_settings import ModelRouterConfig, PickerConfig, SidecarConfig
from tercet_lab.bench.simulated.scenario import EngineGroup, Fault, FleetSpec
from tercet_lab.sim import EngineOptions
from tercet_planner.planner_settings import PlannerConfig

OF_COMMANDS: Mapping[str, type[Settings]] = {
    "tercet up": UpConfig,
    "tercet router": RouterConfig,
    "tercet planner": PlannerConfig,
    "tercet epp": PickerConfig,
    "tercet sidecar": SidecarConfig,
    "tercet model-router": ModelRouterConfig,
    "tercet chaos": ChaosConfig,
}
"""Commands whose settings are read in this order: flag, environment variable, file, default."""

SETTINGS_HEAD = """# Settings

A setting of `tercet up`, `tercet router`, `tercet planner`, `tercet epp`, `tercet sidecar`, `tercet model-router` and `tercet chaos` is a flag, an environment variable and a key of the
YAML file that `--config` names. It is read in this order: flag, variable, file, default. Unknown keys and values out of range are
refused. Keys without a flag are for files and variables only. The variable is `TERCET_` and the key in capitals, with `_` for `-`;
[environment variables](environment.md) lists all of them, with the few that have other names.
"""

FILES_HEAD = """# Files

The keys of files with other forms. An unknown key is refused in all of them.
"""


def settings_page() -> str:
    """Return the page of settings of commands, benchmarks and the engine's plugin."""
    router = [RouterSettings]
    return "\n\n".join(
        [
            SETTINGS_HEAD.strip(),
            "## Of a router\n\nFor both `tercet up` and `tercet router`.",
            settings_table(RouterSettings),
            "## Of `tercet up` only",
            settings_table(UpConfig, but=router),
            "## Of `tercet router` only",
            settings_table(RouterConfig, but=router),
            "## Of `tercet planner`",
            settings_table(PlannerConfig, but=[RouterConfig]),
            "## Of `tercet epp`",
            settings_table(PickerConfig),
            "## Of `tercet sidecar`",
            settings_table(SidecarConfig),
            "## Of `tercet chaos`",
            settings_table(ChaosConfig),
            "## Of `tercet bench serve` and `tercet bench compare`\n\nFlags and keys of `--config FILE`. The only variable is `TERCET_URL`, for `--base-url`.",
            settings_table(BenchConfig),
            "Only for `tercet bench serve`:",
            settings_table(ServeConfig, but=[BenchConfig]),
            "Only for `tercet bench compare`:",
            settings_table(CompareConfig, but=[BenchConfig]),
            "## Of an engine's plugin\n\nKeys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`.",
            table(("key", "default", ""), ((code(each.key), default_of(each), each.help) for each in declared(PluginSettings))),
        ]
    )  # fmt: skip


def settings_table(kind: type[Settings], but: Sequence[type[Settings]] = ()) -> str:
    """Return a table of the settings of ``kind``, without those of the types ``but``."""
    elsewhere = {each.key for other in but for each in declared(other)}
    own = [each for each in declared(kind) if each.key not in elsewhere]
    rows = ((_flag(each), code(each.key), default_of(each), each.help) for each in own)
    return table(("flag", "key", "default", ""), rows)


def _flag(of: Declared) -> str:
    return code(f"{of.flag} {of.shown_kind}".strip()) if of.flag else ""


def default_of(of: Declared) -> str:
    """Return the default as text, or ``needed`` for a required setting."""
    return of.shown_default or ("needed" if of.is_required else "")


def files_page() -> str:
    """Return the page of files with other forms."""
    return "\n\n".join(
        [
            FILES_HEAD.strip(),
            "## The scheduling file\n\n[Scheduling](../scheduling.md) describes it.",
            *_records(SchedulingConfig, PluginEntry, ProfileConfig, PluginUse),
            "### Its plugins",
            _plugins(),
            "## A plan of programs\n\nThe body of `PUT /tercet/v1/program`, and the file of `tercet program --plan`;"
            " [Programs](../programs.md#changing-programs-while-traffic-flows) describes it.",
            *_records(Plan, Share, Rule),
            "## Engines of a router\n\nItems of `engines` in the file of `tercet router --config`.",
            *_records(EngineAddress),
            "## A simulated fleet\n\nThe file of `tercet sim --fleet`; [the simulator](../simulator.md) describes it.",
            *_records(FleetSpec, EngineGroup, Fault),
            "### Options of a simulated engine\n\nEach can also be given as `--option KEY=VALUE`.",
            *_records(EngineOptions),
        ]
    )


def _records(*kinds: type[msgspec.Struct]) -> list[str]:
    return [f"`{kind.__name__}`: {_told(kind)}\n\n{fields_table(kind)}" for kind in kinds]


def _told(kind: type[msgspec.Struct]) -> str:
    text = prose(kind.__doc__)
    return text if "\n\n- " in text else text.replace("\n", " ")


def fields_table(kind: type[msgspec.Struct]) -> str:
    """Return a table of the fields of a record: key, type and default."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return table(
        ("key", "value", "default"),
        ((code(each.encode_name), _type_in_words(hints[each.name]), _default_in_words(each)) for each in fields),
    )


def _plugins() -> str:
    rows: list[tuple[str, str, str]] = []
    for name, kind in BUILT_IN.items():
        fields = msgspec.structs.fields(kind)
        parameters = ", ".join(f"`{each.encode_name}` ({_default_in_words(each)})" for each in fields)
        rows.append((code(name), parameters, first_sentence(kind.__doc__)))
    return table(("type", "parameters", ""), rows)


def _default_in_words(field: msgspec.structs.FieldInfo) -> str:
    default: Any = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if default is msgspec.NODEFAULT:
        return "needed"
    if isinstance(default, bool):
        return str(default).lower()
    if default is None or (isinstance(default, tuple | dict | frozenset) and not default):
        return "none"
    return code(f"{default:g}" if isinstance(default, float) else str(default))


def _type_in_words(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_in_words(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type_in_words(each) for each in args if each is not type(None))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in args)
    if origin is tuple or origin is frozenset:
        return f"a list of {_type_in_words(args[0])}"
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "a mapping"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"`{kind.__name__}`"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "anything")
