"""Settings of `tercet up`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Annotated

from msgspec import Meta

from tercet.cluster.engine_command import check_flags, gpu_memory_of, kv_transfer_config, ranks_of
from tercet.decisions.launch import launch_order, ratio_of
from tercet.protocol import BadRequest, Role
from tercet.settings import RouterSettings, Setting
from tercet.settings.declaration import NotNegative
from tercet.settings.panels import ENGINES, MODEL, OBSERVABILITY, SERVER
from tercet.settings.router_config import Port

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

    @property
    def serves_without_vllm(self) -> bool:
        """Whether vLLM is not needed: for simulated engines, unless the router's layer of vLLM is requested."""
        return self.openai_layer == "small" or (
            self.openai_layer == "auto" and self.simulate is not None and self.workers == 1 and not self.vllm_args
        )

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """Name and role of every engine, in the order of their starts."""
        if self.max_instances is not None:
            order: list[Role] = [*launch_order(self.max_instances, ratio_of(self.pd_ratio))]
        else:
            counts: dict[Role, int] = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
            order = [role for role, engines in counts.items() for _ in range(engines)]
        numbers: dict[Role, Iterator[int]] = {role: count() for role in order}
        return [(f"{'engine' if role == 'both' else role}-{next(numbers[role])}", role) for role in order]
