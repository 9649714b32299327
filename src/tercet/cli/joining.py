"""``tercet engine --join``: run engines in the foreground as members of a running router's fleet."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import msgspec

from tercet.aio import signals_to
from tercet.cli.terminal import announce
from tercet.cluster.child_process import Process
from tercet.cluster.compute import devices_for_engines, split_cores
from tercet.cluster.device_plan import DeviceShare, plan_devices
from tercet.cluster.engine_command import (
    EngineSpec,
    engine_argv,
    engine_env,
    gpu_memory_of,
    ranks_of,
    require_private,
)
from tercet.cluster.foresight import require_memory
from tercet.cluster.joining import JoiningEngine, run_joined
from tercet.cluster.log_directories import log_directory
from tercet.cluster.ports import require_free, url_of
from tercet.protocol import BadRequest, Role
from tercet.protocol.access import key_of
from tercet.settings import SECRET_VARIABLE, require_url

_ANY_ADDRESS = ("", "0.0.0.0", "::")


def specs_of(spec: EngineSpec, instances: int) -> list[EngineSpec]:
    """Return ``instances`` specs like ``spec``, at consecutive ports, which share this machine's cores or devices."""
    shares, computes = [DeviceShare(())] * instances, spec.simulate is None
    devices = devices_for_engines() if computes else ()
    if devices:
        shares = plan_devices(devices, instances, ranks_of(spec.extra_args), gpu_memory_of(spec.extra_args))
    cores: Sequence[tuple[int, ...]] = [()] * instances
    if computes and not devices:
        cores = split_cores(sorted(os.sched_getaffinity(0)), instances)
    return [
        msgspec.structs.replace(
            spec,
            name=spec.name if instances == 1 else f"{spec.name}-{index}",
            port=spec.port + index,
            cores=cores[index],
            gpus=shares[index].devices,
            gpu_memory=shares[index].memory,
        )
        for index in range(instances)
    ]


def joining_specs(spec: EngineSpec, router: str, instances: int) -> list[EngineSpec]:
    """Return :func:`specs_of` engines that can join ``router``; raise :class:`~tercet.protocol.TercetError`."""
    require_url(router, "--join", "http://10.0.0.9:8000")
    if spec.host in _ANY_ADDRESS:
        raise BadRequest(
            f"--host: {spec.host!r} is not an address; give the one at which the router reaches the engine", "host"
        )
    specs = specs_of(spec, instances)
    for each in specs:
        require_private(each)
        require_free(each.host, each.port)
    return specs


def join_router(specs: Sequence[EngineSpec], router: str, role: Role, drain_seconds: float) -> None:
    """Run the engines of ``specs`` as members of the fleet of ``router`` until SIGINT or SIGTERM.

    Raises :class:`~tercet.protocol.TercetError`; exits with 130 or 143 after a signal.
    """
    require_memory(specs)
    logs = log_directory(None)
    announce(f"logs: {logs}")
    engines = [
        JoiningEngine(
            each.name,
            role,
            url_of(each.host, each.port),
            Process(each.name, engine_argv(each), {**engine_env(each)}, logs / f"{index}.log"),
        )
        for index, each in enumerate(specs)
    ]
    secret = key_of(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)
    asyncio.run(_run(engines, router, secret, drain_seconds))


async def _run(engines: Sequence[JoiningEngine], router: str, secret: str, drain_seconds: float) -> None:
    running = asyncio.ensure_future(
        run_joined(engines, router, secret, drain_seconds, lambda name, state: announce(f"  {name}: {state}"))
    )
    hurried: list[asyncio.Task[None]] = []

    def stop() -> None:
        announce("leaving the fleet; a second signal stops at once")
        running.cancel()

    def hurry() -> None:
        announce("stopping at once")
        hurried.extend(asyncio.ensure_future(each.process.hurry()) for each in engines)
        running.cancel()

    with signals_to(stop, hurry) as asked:
        try:
            await running
        except asyncio.CancelledError:
            await asyncio.gather(*hurried)
            sys.exit(128 + asked[0] if asked else 1)
