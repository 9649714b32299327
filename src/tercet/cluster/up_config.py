"""Settings of `tercet up`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Annotated

from msgspec import Meta

from tercet.cluster.engine_command import check_flags, gpu_memory_of, kv_transfer_config, ranks_of
from tercet.cluster.replicas import is_group
from tercet.decisions.launch import launch_order, ratio_of
from tercet.protocol import BadRequest, Role
from tercet.settings import RouterSettings, Setting
from tercet.settings.declaration import NotNegative
from tercet.settings.panels import ENGINES, MODEL, OBSERVABILITY, SERVER
from tercet.settings.router_config import Port

RAY = "Ray"
_RAY = re.compile(r"ray(:[^\s/]+:[0-9]{1,5})?")
Count = Annotated[int, Meta(ge=0, le=1024)]


class UpConfig(RouterSettings, frozen=True):
    """A local fleet: ``prefill``, ``decode`` and ``both`` engines, and a router with the settings of any."""

    prefill: Annotated[Count, Setting("Prefill engines.", panel=ENGINES)] = 1
    decode: Annotated[Count, Setting("Decode engines.", panel=ENGINES)] = 1
    both: Annotated[Count, Setting("Engines for either role.", panel=ENGINES)] = 0
    max_instances: Annotated[
        Annotated[int, Meta(ge=2, le=1024)] | None,
        Setting(
            "Prefill and decode engines together, split by --pd-ratio; in the place of --prefill and --decode.",
            default="as many as these say",
            panel=ENGINES,
        ),
    ] = None
    pd_ratio: Annotated[
        str,
        Setting(
            "With --max-instances: prefill to decode engines; the closest with one of each.",
            metavar="P:D",
            panel=ENGINES,
        ),
    ] = "1:1"
    port: Annotated[Port, Setting("The router's port; 0: any.", env="TERCET_HTTP_PORT", panel=SERVER)] = 8000
    on: Annotated[
        str | None,
        Setting("Machines for engines: `ray`, or `ray:HOST:PORT` of its head; the router runs here.",
                metavar="ray[:ADDRESS]", default="this machine", panel=RAY),
    ] = None  # fmt: skip
    fleet_name: Annotated[
        str | None, Setting("With --on: the fleet's name there, by which it is found again.", default="tercet-PORT",
                            panel=RAY)
    ] = None  # fmt: skip
    engine_cpus: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Setting("With --on: CPUs that an engine asks Ray for.", default="one for each rank; simulated, 0.1", panel=RAY),
    ] = None
    engine_gpus: Annotated[
        Annotated[int, Meta(ge=0, le=64)], Setting("With --on: GPUs that each rank asks Ray for.", panel=RAY)
    ] = 0
    engine_memory_gib: Annotated[
        Annotated[float, Meta(ge=0)],
        Setting("With --on: memory that an engine asks Ray for.", unit="GiB", panel=RAY),
    ] = 0.0
    engines_on_head: Annotated[
        bool, Setting("With --on: the machine of Ray's head may have engines.", default="off", panel=RAY)
    ] = False
    dtype: Annotated[
        str | None,
        Setting(
            "Data type of weights and activations, as vLLM's `--dtype`. float32 for token-exact comparisons.",
            default="vLLM's on GPUs; bfloat16 on CPUs, float32 without instructions for that",
            panel=MODEL,
        ),
    ] = None
    kv_cache_gib: Annotated[
        Annotated[int, Meta(ge=1)], Setting("KV memory of each CPU engine.", unit="GiB", panel=ENGINES)
    ] = 1
    engine_restarts: Annotated[
        NotNegative,
        Setting("Most restarts of an engine that dies, in a row, without a minute of serving; 0: none.", panel=ENGINES),
    ] = 5
    detach: Annotated[
        bool,
        Setting(
            "Return once it is ready, and leave it in the background; see `tercet down`.", default="off", panel=SERVER
        ),
    ] = False
    log_dir: Annotated[
        str | None, Setting("Directory for logs.", default="a new directory in the cache", panel=OBSERVABILITY)
    ] = None
    simulate: Annotated[
        str | None,
        Setting("Simulated engines, at the pace of a profile; the router is real.", metavar="PROFILE", panel=ENGINES),
    ] = None
    options: Annotated[
        Mapping[str, str],
        Setting("With --simulate: an option of the simulated engines; repeatable.", flag="--option", panel=ENGINES),
    ] = {}
    engine_args: Annotated[tuple[str, ...], Setting("Flags of every vLLM engine; after `--`.", flag="")] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_count()
        if self.prefill + self.decode + self.both == 0:
            raise BadRequest("--prefill, --decode and --both are all 0: there is no engine to start", "prefill")
        if self.options and self.simulate is None:
            raise BadRequest("options: require simulate", "options")
        if self.lora_modules and self.simulate is not None:
            raise BadRequest("lora-modules: cannot be combined with simulate", "lora-modules")
        if self.engine_args and self.simulate is not None:
            raise BadRequest("engine-args: cannot be combined with simulate", "engine-args")
        if self.openai_layer == "small" and self.simulate is None:
            raise BadRequest("openai-layer: small requires simulate; vLLM engines need vLLM's layer", "openai-layer")
        self.require_stream_ports_beside(self.port)
        self._require_ray()
        check_flags(self.engine_args, "engine-args")
        for read in (ranks_of, gpu_memory_of, kv_transfer_config):
            read(self.engine_args)
        check_flags(self.vllm_args, "router-args")

    def _require_one_count(self) -> None:
        ratio_of(self.pd_ratio)
        if self.max_instances is None and self.pd_ratio != "1:1":
            raise BadRequest("pd-ratio: requires max-instances", "pd-ratio")
        if self.max_instances is not None and (self.prefill, self.decode, self.both) != (1, 1, 0):
            raise BadRequest("max-instances: is split by pd-ratio; leave prefill, decode and both out", "max-instances")

    def _require_ray(self) -> None:
        if self.on is None:
            given = (self.fleet_name, self.engine_cpus, self.engine_gpus, self.engine_memory_gib, self.engines_on_head)
            if any(given):
                raise BadRequest("on: fleet-name and what an engine asks Ray for require it", "on")
        elif _RAY.fullmatch(self.on) is None:
            raise BadRequest(f"on: {self.on!r} is neither ray nor ray:HOST:PORT", "on")
        elif is_group(self.engine_args):
            raise BadRequest("on: engines that are data-parallel ranks of one group run on one machine", "on")

    @property
    def ray_address(self) -> str:
        """The address of Ray's head; ``auto`` for the cluster of this machine."""
        return (self.on or "").removeprefix("ray").removeprefix(":") or "auto"

    @property
    def serves_without_vllm(self) -> bool:
        """Whether vLLM is not needed: for simulated engines, unless the router's layer of vLLM is requested."""
        return self.openai_layer == "small" or (
            self.openai_layer == "auto" and self.simulate is not None and self.workers == 1 and not self.vllm_args
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
