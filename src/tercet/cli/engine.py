"""``tercet engine``: run one engine in the foreground, or several that join a router and leave it at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tercet.cli.setting_flags import (
    VLLM_FLAGS,
    Dtype,
    Host,
    Model,
    ServedModelName,
    VLLMArgs,
    flags_as_records,
    require_defaults,
)
from tercet.protocol import BadRequest, Role
from tercet.protocol.names import LAST_PORT
from tercet.settings.process_settings import PREFILL_HOSTS_VARIABLE


@dataclass(frozen=True)
class EngineFlags:
    """An engine to run, how to run it, and its membership of a running router's fleet."""

    model: Model = "smollm2"
    port: Annotated[int, typer.Option(min=1, max=LAST_PORT, help="Port of the HTTP server.")] = 8001
    host: Host = "127.0.0.1"
    name: Annotated[str | None, typer.Option(help="Name of the engine.", show_default="HOST:PORT")] = None
    dtype: Dtype = None
    served_model_name: ServedModelName = None
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="KV memory of a CPU engine (GiB).")] = 1
    print_only: Annotated[bool, typer.Option("--print", help="Print the plain vLLM command and exit.")] = False
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE", help="Profile of a simulated engine, which computes nothing; see `tercet bench profile`."
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the simulated engine; needs --simulate. Repeatable."),
    ] = None
    prefill_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Engines that the header x-prefiller-host-port may name to prefill. HOST: an address, a network or "
            "a name, which may have *; PORT: a port, a range or *.",
            envvar=PREFILL_HOSTS_VARIABLE,
            show_envvar=False,
            show_default="none: the header is ignored",
        ),
    ] = None
    join: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a running router; the engine joins its fleet, and leaves it when it is stopped."
        ),
    ] = None
    role: Annotated[Role, typer.Option(help="Role of the engine in that fleet; needs --join.")] = "both"
    instances: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of engines, at --port and the ports after it; needs --join.")
    ] = 1
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0, help="Longest time to move or finish sequences before the engine leaves (seconds); needs --join."
        ),
    ] = 25.0
    vllm_args: VLLMArgs = None

    def require_consistent(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for flags that exclude or need one another."""
        if self.join is None:
            require_defaults(self, "--join", "role", "instances", "drain_timeout")
        elif self.print_only:
            raise BadRequest("--print: cannot be combined with --join", "--print")
        if self.simulate is None:
            require_defaults(self, "--simulate", "option")
        if self.simulate is not None and (self.vllm_args or self.print_only):
            refused = "--print" if self.print_only else VLLM_FLAGS
            raise BadRequest(f"{refused}: cannot be combined with --simulate, which runs no vLLM", refused)


@flags_as_records
def engine(given: EngineFlags) -> None:
    """Run one engine: a standard vLLM server that also offers the verbs.

    On a CPU the engine computes on every core that this command may use. Choose them with `taskset`; or, to leave some
    cores to its other processes, with `VLLM_CPU_OMP_THREADS_BIND`, as for vLLM. This command becomes the server:
    signals go to vLLM itself.

    Examples:
    - `tercet engine --port 8001`
    - `taskset -c 0-7 tercet engine --model ~/models/qwen --port 8002 --name p0 -- --max-num-seqs 32`
    - `tercet engine --model Qwen/Qwen3-0.6B --print`
    - `tercet engine --simulate llama-3.1-8b-h100-tp1 --port 8002`
    - `tercet engine --host 10.0.0.7 --join http://10.0.0.9:8000 --role decode`
    """
    given.require_consistent()
    from tercet.cli.engine_process import run_engine

    run_engine(given)
