"""Settings of `tercet up`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tercet.cluster.vllm_flags import check_engine_flags, check_flags, is_group, value_of
from tercet.decisions.planning import launch_order, ratio_of
from tercet.protocol import BadRequest, Role
from tercet.protocol.access import given_key, key_of
from tercet.protocol.names import require_fleet_name
from tercet.settings import RouterConfig, RouterSettings, Setting
from tercet.settings.declaration import ENGINES, MODEL, OBSERVABILITY, SERVER, NotNegative, Port
from tercet.settings.process_settings import API_KEY_VARIABLE

RAY = "Ray"
_RAY = re.compile(r"ray(:[^\s/]+:[0-9]{1,5})?")
Count = Annotated[int, Meta(ge=0, le=1024)]


class UpConfig(RouterSettings, frozen=True):
    """Settings of a fleet: numbers of ``prefill``, ``decode`` and ``both`` engines, and all settings of a router."""

    prefill: Annotated[Count, Setting("Number of prefill engines.", panel=ENGINES)] = 1
    decode: Annotated[Count, Setting("Number of decode engines.", panel=ENGINES)] = 1
    both: Annotated[Count, Setting("Number of engines with the role `both`.", panel=ENGINES)] = 0
    max_instances: Annotated[
        Annotated[int, Meta(ge=2, le=1024)] | None,
        Setting(
            "Total of prefill and decode engines; --pd-ratio splits it. Replaces --prefill and --decode.",
            default="their sum",
            panel=ENGINES,
        ),
    ] = None
    pd_ratio: Annotated[
        str,
        Setting(
            "Ratio of prefill to decode engines; at least one of each. Needs --max-instances.",
            metavar="P:D",
            panel=ENGINES,
        ),
    ] = "1:1"
    port: Annotated[Port, Setting("Port of the router; 0: any free port.", env="TERCET_HTTP_PORT", panel=SERVER)] = 8000
    on: Annotated[
        str | None,
        Setting("Ray cluster for engines: `ray`, or `ray:HOST:PORT`; the router runs here.",
                metavar="ray[:ADDRESS]", default="this machine", panel=RAY),
    ] = None  # fmt: skip
    fleet_name: Annotated[
        str | None, Setting("Name of the fleet on Ray, by which it is found again; needs --on.", default="tercet-PORT",
                            panel=RAY)
    ] = None  # fmt: skip
    engine_cpus: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Setting(
            "Number of CPUs that each engine requests from Ray; needs --on.",
            default="1 for each rank; 0.1 if simulated",
            panel=RAY,
        ),
    ] = None
    engine_gpus: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        Setting("Number of GPUs that each rank requests from Ray; needs --on.", panel=RAY),
    ] = 0
    engine_memory_gib: Annotated[
        Annotated[float, Meta(ge=0)],
        Setting("Memory that each engine requests from Ray; needs --on.", unit="GiB", panel=RAY),
    ] = 0.0
    engines_on_head: Annotated[
        bool, Setting("Allow engines on the machine of Ray's head; needs --on.", default="off", panel=RAY)
    ] = False
    dtype: Annotated[
        str | None,
        Setting(
            "Data type of weights and activations, as vLLM's `--dtype`. Use float32 for token-exact comparisons.",
            default="vLLM's on GPUs; bfloat16 on CPUs, or float32 if the CPU has no instructions for it",
            panel=MODEL,
        ),
    ] = None
    kv_cache_gib: Annotated[
        Annotated[int, Meta(ge=1)], Setting("KV memory of each CPU engine.", unit="GiB", panel=ENGINES)
    ] = 1
    engine_restarts: Annotated[
        NotNegative,
        Setting(
            "Most restarts of an engine, or of the router, in a row; a minute of serving resets the count. 0: none.",
            panel=ENGINES,
        ),
    ] = 5
    detach: Annotated[
        bool,
        Setting(
            "Return when the fleet is ready, and run it in the background; see `tercet down`.",
            default="off",
            panel=SERVER,
        ),
    ] = False
    log_dir: Annotated[
        str | None, Setting("Directory for logs.", default="a new directory in the cache", panel=OBSERVABILITY)
    ] = None
    simulate: Annotated[
        str | None,
        Setting(
            "Profile of simulated engines; the router is real. `tercet bench profile` lists profiles.",
            metavar="PROFILE",
            panel=ENGINES,
        ),
    ] = None
    options: Annotated[
        Mapping[str, str],
        Setting("Option of the simulated engines; needs --simulate. Repeatable.", flag="--option", panel=ENGINES),
    ] = {}
    engine_args: Annotated[tuple[str, ...], Setting("Flags of every vLLM engine; they follow `--`.", flag="")] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio_of(self.pd_ratio)
        if self.max_instances is None and self.pd_ratio != "1:1":
            raise BadRequest("pd-ratio: needs max-instances", "pd-ratio")
        if self.max_instances is not None and (self.prefill, self.decode, self.both) != (1, 1, 0):
            raise BadRequest(
                "max-instances: cannot be combined with prefill, decode or both; remove these", "max-instances"
            )
        if self.prefill + self.decode + self.both == 0:
            raise BadRequest("--prefill, --decode and --both are all 0; start at least one engine", "prefill")
        if self.options and self.simulate is None:
            raise BadRequest("options: needs simulate", "options")
        if self.lora_modules and self.simulate is not None:
            raise BadRequest("lora-modules: cannot be combined with simulate", "lora-modules")
        if self.engine_args and self.simulate is not None:
            raise BadRequest(
                f"engine-args: {self.engine_args[0]!r} cannot be used with simulated engines; remove it", "engine-args"
            )
        if self.openai_layer == "small" and self.simulate is None:
            raise BadRequest("openai-layer: small needs simulate; vLLM engines need vLLM's layer", "openai-layer")
        self.require_stream_ports_without(self.port)
        if self.fleet_name is not None:
            require_fleet_name(self.fleet_name, "fleet-name")
        if self.on is None:
            given = (self.fleet_name, self.engine_cpus, self.engine_gpus, self.engine_memory_gib, self.engines_on_head)
            if any(given):
                raise BadRequest(
                    "on: is required by fleet-name, engine-cpus, engine-gpus, engine-memory-gib and engines-on-head",
                    "on",
                )
        elif _RAY.fullmatch(self.on) is None:
            raise BadRequest(f"on: must be ray or ray:HOST:PORT, is {self.on!r}", "on")
        elif is_group(self.engine_args):
            raise BadRequest(
                "on: cannot be combined with --data-parallel-size: the ranks of one group run on one machine", "on"
            )
        check_engine_flags(self.engine_args, "engine-args")
        check_flags(self.vllm_args, "router-args")

    @property
    def ray_address(self) -> str:
        """The address of Ray's head; ``auto`` for the cluster of this machine."""
        return (self.on or "").removeprefix("ray").removeprefix(":") or "auto"

    @property
    def serves_without_vllm(self) -> bool:
        """True if vLLM is not needed: engines are simulated, and the router does not use vLLM's OpenAI layer."""
        return self.openai_layer == "small" or (
            self.openai_layer == "auto" and self.simulate is not None and not self.vllm_args
        )

    @property
    def engine_roles(self) -> list[tuple[str, Role]]:
        """Name and role of every engine, in the order of their starts."""
        counts: dict[Role, int] = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        order: list[Role] = [role for role, engines in counts.items() for _ in range(engines)]
        if self.max_instances is not None:
            order = launch_order(self.max_instances, ratio_of(self.pd_ratio))
        numbers: dict[Role, Iterator[int]] = {role: count() for role in order}
        return [(f"{'engine' if role == 'both' else role}-{next(numbers[role])}", role) for role in order]


def require_usable_router(config: RouterSettings, inherited: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for what a router would refuse only after it has loaded vLLM.

    Refused are unusable keys, a router that other machines reach without a key, and unusable programs, policies and
    scheduling. The check reads the files that the settings name.
    """
    from tercet.decisions.migration import policies_of
    from tercet.decisions.scheduling import load_scheduling
    from tercet.programs import load_program
    from tercet.wire.serving.server_access import RouterKeys  # imports asyncio

    shown = value_of(config.vllm_args, "--api-key")
    named = key_of(shown or "", "--api-key")
    given = named or key_of(inherited.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE)
    keys = RouterKeys(config, [given] if given else [])
    if value_of(config.vllm_args, "--uds") is None:
        keys.require_private(config.host, config)
    given_key(shown, "--api-key")  # a router for this machine would start without the key that was meant
    if isinstance(config, RouterConfig):
        keys.require_private_admin(config.admin_address)
    load_program(config.program, config.program_args)
    policies_of(config.reschedule)
    if config.scheduling is not None:
        load_scheduling(Path(config.scheduling).expanduser())
