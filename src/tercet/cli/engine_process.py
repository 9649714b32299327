"""The process of ``tercet engine``: it becomes the server, or runs several engines that join a router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import typer

from tercet.aio.tasks import keep_running, signals_to
from tercet.cli.setting_flags import PARTS, VLLM_FLAGS, given_as
from tercet.cli.terminal import announce, note
from tercet.cluster.child_process import Process, describe_exit
from tercet.cluster.detached_fleets import log_directory
from tercet.cluster.devices import devices_for_engines, pick_devices
from tercet.cluster.engine_command import (
    EngineSpec,
    as_shell,
    engine_argv,
    engine_env,
    plain_argv,
    require_memory,
    require_private,
    shared_cores,
    simulated_engine,
    with_places,
)
from tercet.cluster.model import BUILT_IN, known_model, resolve_model, resolve_tokenizer
from tercet.cluster.ports import require_free, url_of
from tercet.cluster.running_fleet import LOADING, OnEvent, until_ready
from tercet.cluster.vllm_flags import check_engine_flags, gpu_memory_of, ranks_of, value_of
from tercet.protocol import BadRequest, Role, TercetError
from tercet.protocol.access import key_of
from tercet.protocol.names import AllowedPrefillers, require_engine_name
from tercet.protocol.wire import JoinCall
from tercet.settings import SECRET_VARIABLE, key_values, require_url
from tercet.settings.process_settings import THREADS_BIND
from tercet.wire.client.bounded_answers import LEAVE_SECONDS, RouterMembership

if TYPE_CHECKING:
    from tercet.cli.engine import EngineFlags


def run_engine(given: EngineFlags) -> None:
    """Run the engine of these flags, or print its command.

    The conversion of the built-in model takes long, so all that prevents a start is found before it.
    """
    spec = _spec_of(given)
    with given_as(PARTS):  # wrong values first, whatever runs on this machine
        AllowedPrefillers(spec.prefill_hosts, "--prefill-hosts")
        check_engine_flags(spec.extra_args, VLLM_FLAGS)
        if spec.simulate is not None:
            simulated_engine().require_usable(spec.simulate, spec.options)
    if given.join is not None:
        _require_model(spec)
        require_url(given.join, "--join", "http://10.0.0.9:8000")
        if spec.host in _ANY_ADDRESS:
            why = "is not an address; give the one at which the router reaches the engine"
            raise BadRequest(f"--host: {spec.host!r} {why}", "host")
        specs = _specs_of(spec, given.instances)
        for each in specs:
            require_private(each)
            require_free(each.host, each.port)
        join_router([_with_model(each) for each in specs], given.join, given.role, given.drain_timeout)
    elif given.print_only:
        shown = _with_devices(_with_model(spec))
        typer.echo(as_shell(plain_argv(shown), _environment(shown)))
    else:
        require_private(spec)
        _require_model(spec)
        require_free(spec.host, spec.port)
        if spec.simulate is not None:
            simulated_engine().serve(_with_model(spec))
            return
        spec = _with_devices(_with_model(spec))
        require_memory([spec])
        if (slow := shared_cores([spec])) is not None:
            note(slow)
        argv = engine_argv(spec)
        # The same process becomes the server: signals, exit code and number are those that a supervisor expects.
        os.execvpe(argv[0], argv, {**os.environ, **_environment(spec)})


def _spec_of(given: EngineFlags) -> EngineSpec:
    """Return the engine of these flags, without cores or devices; its model is the name that was given."""
    if given.name is not None:
        require_engine_name(given.name, "--name")
    return EngineSpec(
        name=given.name or f"{given.host}:{given.port}",
        model=given.model,
        served_model_name=given.served_model_name or given.model,
        host=given.host,
        port=given.port,
        dtype=given.dtype,
        built_in=given.model == BUILT_IN,
        kv_cache_gib=given.kv_cache_gib,
        extra_args=tuple(given.vllm_args or ()),
        simulate=given.simulate,
        options=key_values(given.option, "--option"),
        prefill_hosts=given.prefill_hosts or "",
    )


def _require_model(spec: EngineSpec) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a model that does not exist; the built-in one is not converted."""
    if spec.simulate is None:
        known_model(spec.model)
    else:
        resolve_tokenizer(spec.model)


def _with_model(spec: EngineSpec) -> EngineSpec:
    """Return ``spec`` with the model to load; the built-in model may be converted first."""
    resolved = resolve_model(spec.model, note) if spec.simulate is None else resolve_tokenizer(spec.model)
    return msgspec.structs.replace(spec, model=resolved)


def _environment(spec: EngineSpec) -> dict[str, str]:
    """Return the variables of the engine's process; the caller's own binding of threads to cores is kept."""
    env = engine_env(spec)
    if THREADS_BIND in os.environ:
        return {name: value for name, value in env.items() if name not in (THREADS_BIND, "OMP_NUM_THREADS")}
    return {**env}


def _with_devices(spec: EngineSpec) -> EngineSpec:
    """Return ``spec`` with its cores or devices. Data-parallel ranks choose by number among all visible devices."""
    devices, args = devices_for_engines(), spec.extra_args
    # The caller's own choice of cores, by taskset, limits this process and with it the engine.
    if not devices:
        return msgspec.structs.replace(spec, cores=tuple(sorted(os.sched_getaffinity(0))))
    if value_of(args, "--data-parallel-size", "-dp") is not None:
        return spec
    picked = pick_devices(devices, ranks_of(args), gpu_memory_of(args))
    return msgspec.structs.replace(spec, gpus=picked.devices, gpu_memory=picked.memory)


_ANY_ADDRESS = ("", "0.0.0.0", "::")


def _specs_of(spec: EngineSpec, instances: int) -> list[EngineSpec]:
    """Return ``instances`` specs like ``spec``, at consecutive ports, which share this machine's cores or devices."""
    names = [spec.name] if instances == 1 else [f"{spec.name}-{index}" for index in range(instances)]
    replace = msgspec.structs.replace
    return with_places([replace(spec, name=name, port=spec.port + index) for index, name in enumerate(names)])


def join_router(specs: Sequence[EngineSpec], router: str, role: Role, drain_seconds: float) -> None:
    """Run the engines of ``specs`` as members of the fleet of ``router`` until SIGINT or SIGTERM.

    Raises :class:`~tercet.protocol.TercetError`; exits with 130 or 143 after a signal.
    """
    # All engines together: each alone might fit.
    require_memory(specs)
    logs = log_directory(None)
    announce(f"logs: {logs}")
    engines = list[JoiningEngine]()
    for index, each in enumerate(specs):
        process = Process(each.name, engine_argv(each), {**engine_env(each)}, logs / f"{index}.log")
        engines.append(JoiningEngine(each.name, role, url_of(each.host, each.port), process))
    secret = key_of(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)

    async def run() -> None:
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

    asyncio.run(run())


LOOK_SECONDS = 0.2


@dataclass
class JoiningEngine:
    """One engine, which the router reaches at ``url``; ``uid`` identifies this start of the engine."""

    name: str
    role: Role
    url: str
    process: Process
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def call(self, leaving: bool = False) -> JoinCall:
        """Return the call by which the engine joins the router, or is drained before it leaves."""
        return JoinCall(url=self.url, uid=self.uid, role=self.role, leaving=leaving)


async def run_joined(
    engines: Sequence[JoiningEngine], router: str, secret: str, drain_seconds: float, on_event: OnEvent
) -> None:
    """Run engines as members of the router's fleet until cancelled; then drain, remove and stop them.

    ``drain_seconds`` is the longest time in which sequences are moved or finish. Raises
    :class:`~tercet.cluster.child_process.StartFailed` if an engine does not start, or ends by itself.
    """
    try:
        for engine in engines:
            await engine.process.start()
            on_event(engine.name, LOADING)
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(_run(engine, router, secret, drain_seconds, on_event))
    except* TercetError as failures:
        raise failures.exceptions[0] from None
    finally:
        # Shielded: a second Ctrl-C must not leave engines behind.
        await asyncio.shield(asyncio.gather(*(engine.process.stop() for engine in engines)))


async def _run(engine: JoiningEngine, router: str, secret: str, drain_seconds: float, on_event: OnEvent) -> None:
    await until_ready(engine.process, engine.url, on_event)
    engine.process.remember_shared_memory()
    async with RouterMembership(router, engine.name, secret) as membership:
        stay = partial(membership.stay, engine.call(), partial(on_event, engine.name))
        # Repeated, not once: a router that has restarted learns of its engines by this call.
        staying = asyncio.create_task(keep_running(stay, f"join of {engine.name}"))
        ended = asyncio.create_task(engine.process.ended())
        try:
            await asyncio.wait({staying, ended}, return_when=asyncio.FIRST_COMPLETED)
        # Also when the engine has ended by itself: the router must not list it any longer than needed.
        finally:
            staying.cancel()
            has_ended = ended.done()
            ended.cancel()
            await asyncio.gather(staying, return_exceptions=True)
            # An engine that has ended has no sequences that could move.
            seconds = 0.0 if has_ended else drain_seconds
            await asyncio.shield(_leave(engine, membership, seconds, on_event))
        if has_ended:
            raise engine.process.failure(describe_exit(ended.result()))
        staying.result()


async def _leave(engine: JoiningEngine, membership: RouterMembership, seconds: float, on_event: OnEvent) -> None:
    """Drain the engine for at most ``seconds`` while the router moves its sequences, then remove it from the fleet."""
    last = 0
    try:
        # Two bounds: the inner one ends the drain, the outer one a router that does not answer at all.
        async with asyncio.timeout(seconds + LEAVE_SECONDS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while left := (await membership.join(engine.call(leaving=True))).in_flight:
                        if left != last:
                            last = left
                            on_event(engine.name, f"leaving the fleet: {left} sequences left")
                        await asyncio.sleep(LOOK_SECONDS)
            await membership.leave(engine.uid)
            on_event(engine.name, "has left the router's fleet")
    except TimeoutError:
        on_event(engine.name, "stops without leaving the fleet: the router does not answer")
    except TercetError as error:
        on_event(engine.name, f"stops without leaving the fleet: {error.message}")
