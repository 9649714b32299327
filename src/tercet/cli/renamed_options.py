"""Options that have another name now, by the command that had them."""

from __future__ import annotations

from collections.abc import Mapping

_SIMULATION = {
    "--rate": "--request-rate",
    "--requests": "--num-prompts, which does not count --num-warmups",
    "--warm-up": "--num-warmups",
    "--arrivals": "--arrival",
    "--slo": "--goodput NAME:MS",
    "--json": "--result-filename",
}
_MEASUREMENT = {
    "--result": "--result-filename",
    "--save-records": "--save-detailed",
    "--no-save-records": "--no-save-detailed",
}
_FILE = {"--json": "--result-filename"}
_KEY = {"--api-key": "--admin-key"}
_OF_ADMINS = (
    "status", "program show", "program set", "program split", "engines list", "engines add", "engines drain",
    "engines remove", "engines role", "scheduling show", "scheduling set", "adapters list", "adapters load",
    "adapters replace", "adapters unload", "moves list", "moves sequences", "moves start",
)  # fmt: skip
RENAMED: Mapping[str, Mapping[str, str]] = {
    "tercet chaos": {"--rate": "--fault-rate", "--requests": "--request-rate"},
    "tercet sim": _SIMULATION,
    "tercet sim sweep": _SIMULATION,
    "tercet bench serve": _MEASUREMENT,
    "tercet bench compare": _MEASUREMENT,
    "tercet bench transfer": _FILE,
    "tercet bench migration": _FILE,
    **dict.fromkeys((f"tercet {command}" for command in _OF_ADMINS), _KEY),
}
