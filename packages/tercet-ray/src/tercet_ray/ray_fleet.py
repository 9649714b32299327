"""A fleet whose engines run on Ray and whose router runs on this machine; they start and stop together."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tercet.aio.files import read_whole, write_whole
from tercet.cluster.child_process import Process, StartFailed, describe_exit
from tercet.cluster.detached_fleets import log_directory
from tercet.cluster.engine_command import EngineSpec
from tercet.cluster.local import lora_flags, router_config, router_of, shared_environment
from tercet.cluster.model import BUILT_IN
from tercet.cluster.ports import free_ports, require_free
from tercet.cluster.running_fleet import (
    LOADING,
    READY_SECONDS,
    STOP_ON_RAY_SECONDS,
    KeptRouter,
    OnEvent,
    RouterAdmin,
    read_events,
    rotate_logs,
)
from tercet.cluster.up_config import UpConfig
from tercet.cluster.vllm_flags import ranks_of
from tercet.fleet.discovery import MOST_BYTES, read_roster
from tercet.protocol import EngineError, Role, UnknownEngine
from tercet.settings import DiscoverySettings, EngineAddress
from tercet_ray import follower as follower_module
from tercet_ray.fleet_keeper import Resources, WantedEngine, WantedFleet

GONE_SECONDS = 60.0
ASK_SECONDS = 0.5
AGAIN_SECONDS = 1.0
REMEDY = "run the same command again to take them over, and stop it to stop them"


class RayProvisioner:
    """The provisioner of a fleet on Ray: it starts and stops engines by changes of the file of the wanted fleet."""

    def __init__(self, file: Path, roster: Path, wanted: WantedFleet, router: RouterAdmin, on_event: OnEvent) -> None:
        self.router, self._on_event = router, on_event
        self._file = file  # describes the wanted fleet, which the follower passes to the keeper
        self._roster = roster  # lists the present engines; the router follows it
        self._wanted = wanted
        self.used: Sequence[str] = self.engines  # names of all present and past engines
        self._lock = asyncio.Lock()

    @property
    def engines(self) -> Sequence[str]:
        return [each.spec.name for each in self._wanted.engines]

    def require_room(self, count: int) -> None:
        """Do nothing: Ray decides about room, and may add machines; :meth:`start` has a timeout."""

    async def wanted(self) -> WantedFleet:
        """Return the wanted fleet: the command's, or the newer one of a fleet that was taken over."""
        content = await asyncio.to_thread(read_whole, self._file)
        self._wanted = msgspec.json.decode(content, type=WantedFleet)
        self.used = list(dict.fromkeys([*self.used, *self.engines]))
        return self._wanted

    async def start(self, name: str, role: Role) -> None:
        """Start an engine, and return when the router has added it."""
        self.used = [*self.used, name]

        def grown(engines: tuple[WantedEngine, ...]) -> tuple[WantedEngine, ...]:
            spec = msgspec.structs.replace(engines[0].spec, name=name)
            return (*engines, msgspec.structs.replace(engines[0], spec=spec, role=role))

        await self._change(grown)
        self._on_event(name, LOADING)
        try:
            async with asyncio.timeout(READY_SECONDS):
                serves = is_member = False
                while not (serves and is_member):
                    await asyncio.sleep(ASK_SECONDS)
                    found = read_roster(await asyncio.to_thread(read_whole, self._roster, MOST_BYTES))
                    serves = any(each.address.name == name and each.serves for each in found)
                    members = await self.router.engines() if serves else ()
                    is_member = any(each["name"] == name and each["reachable"] for each in members)
        except TimeoutError:
            await self._without(name)
            late = f"the engine does not serve after {READY_SECONDS:.0f} s; check that Ray has room for it"
            raise EngineError(late) from None
        except BaseException:
            await asyncio.shield(self._without(name))
            raise
        self._on_event(name, "ready")

    async def set_role(self, name: str, role: Role) -> None:
        await self.router.set_role(name, role)
        await self._change(lambda engines: tuple(
            msgspec.structs.replace(each, role=role) if each.spec.name == name else each for each in engines
        ))  # fmt: skip

    async def stop(self, name: str) -> None:
        """Stop an engine on Ray, and return when the router has removed it."""
        await self._without(name)
        try:
            async with asyncio.timeout(GONE_SECONDS):
                while True:
                    try:
                        await self.router.engine(name)
                    except UnknownEngine:
                        return
                    await asyncio.sleep(ASK_SECONDS)
        except TimeoutError:
            late = f"the engine is still a member after {GONE_SECONDS:.0f} s; check that the follower runs"
            raise EngineError(late) from None

    async def _without(self, name: str) -> None:
        await self._change(lambda engines: tuple(each for each in engines if each.spec.name != name))

    async def _change(self, change: Callable[[tuple[WantedEngine, ...]], tuple[WantedEngine, ...]]) -> None:
        async with self._lock:
            before = await self.wanted()
            after = msgspec.structs.replace(before, engines=change(before.engines), version=before.version + 1)
            await asyncio.to_thread(write_whole, self._file, msgspec.json.encode(after))
            self._wanted = after


@dataclass(frozen=True)
class RayFleet:
    """A fleet whose router answers at ``url``; ``engines`` are the engines that were ready at the start."""

    url: str
    engines: Sequence[EngineAddress]
    kept_router: KeptRouter
    follower: Follower
    log_dir: Path
    provisioner: RayProvisioner

    @property
    def router(self) -> Process:
        return self.kept_router.process

    async def until_broken(self, on_event: OnEvent) -> None:
        """Restart follower and router until the router reaches its limit; then raise :class:`StartFailed`."""
        follows = self.follower.keep(on_event)
        reads = read_events(self.router.log, partial(on_event, self.router.name))
        rotates = rotate_logs(lambda: [self.router.log, self.follower.process.log])
        beside = [asyncio.create_task(each) for each in (follows, reads, rotates)]
        try:
            await self.kept_router.until_broken(on_event)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


class Follower:
    """The process that runs the fleet's keeper and writes the roster; it is restarted when it ends."""

    def __init__(self, fleet: Path, roster: Path, log_dir: Path) -> None:
        self.roster = roster
        argv = [sys.executable, "-m", follower_module.__name__, str(fleet)]
        self.process = Process("ray", [*argv, str(roster)], {}, log_dir / "ray.log")
        self._stopping = Process("ray", argv, {}, log_dir / "ray-down.log")

    async def keep(self, on_event: OnEvent) -> None:
        """Restart the process when it ends, until cancelled."""
        while True:
            how = describe_exit(await self.process.ended())
            while how:
                on_event("ray", f"the follower {how} and is restarted; engines continue to run")
                await asyncio.sleep(AGAIN_SECONDS)
                dead, self.process = self.process, self.process.again(self.process.log)
                await dead.stop()
                how = await self.process.refusal_of_start()

    async def until_ready(self, provisioner: RayProvisioner, on_event: OnEvent) -> Sequence[EngineAddress]:
        """Wait until all wanted engines are ready in the roster, and return them. Raises :class:`StartFailed`."""
        logged: dict[str, str] = {}
        names = provisioner.engines
        deadline = asyncio.get_running_loop().time() + READY_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            if self.process.returncode is not None:
                raise self.process.failure(describe_exit(self.process.returncode))
            with contextlib.suppress(FileNotFoundError):
                await provisioner.wanted()  # a fleet that is taken over may have other engines
                names = provisioner.engines
                found = {each.address.name: each for each in read_roster(read_whole(self.roster, MOST_BYTES))}
                for name, engine in found.items():
                    state = f"ready at {engine.address.url}" if engine.serves else LOADING
                    if logged.get(name) != state:
                        logged[name] = state
                        on_event(name, state)
                if all(name in found and found[name].serves for name in names):
                    return [found[name].address for name in names]
            await asyncio.sleep(ASK_SECONDS)
        late = ", ".join(name for name in names if not logged.get(name, "").startswith("ready"))
        why = f"has engines that are not ready after {READY_SECONDS:.0f} s: {late}; check that Ray has room for them"
        raise self.process.failure(why)

    async def stop_all(self, on_event: OnEvent) -> None:
        """Stop the follower, and then the engines and all other actors of the fleet on Ray."""
        await self.process.stop()
        try:
            async with asyncio.timeout(STOP_ON_RAY_SECONDS):
                await self._stopping.start()
                code = await self._stopping.ended()
            if code:
                on_event("ray", f"engines may still run on Ray; {REMEDY}: {self._stopping.tail()}")
        except TimeoutError:
            late = f"which has not answered for {STOP_ON_RAY_SECONDS:.0f} s"
            on_event("ray", f"engines may still run on Ray, {late}; {REMEDY}")
        finally:
            await self._stopping.stop()


@asynccontextmanager
async def ray_fleet(
    config: UpConfig, model: str, on_event: OnEvent, hurry: asyncio.Event | None = None
) -> AsyncGenerator[RayFleet]:
    """Start the fleet that ``config`` describes, with engines on Ray; stop all of it on exit.

    Parameters and errors are those of :func:`tercet.cluster.local.local_fleet`. Running engines of this fleet, such as
    after a SIGKILL of an earlier process, are taken over.
    """
    if config.port:
        require_free(config.host, config.port)
    log_dir = log_directory(config.log_dir)
    roster, file = log_dir / "roster.json", log_dir / "ray-fleet.json"
    port = config.port or free_ports(config.host, 1)[0]
    wanted = wanted_fleet(config, model, port)
    await asyncio.to_thread(write_whole, file, msgspec.json.encode(wanted))
    await asyncio.to_thread(roster.unlink, missing_ok=True)
    follower = Follower(file, roster, log_dir)
    key = secrets.token_urlsafe()
    settings = router_config(config, model, port, (), log_dir, DiscoverySettings(roster=str(roster)), key)
    router = router_of(config, settings, log_dir)
    try:
        await follower.process.start()
        await router.process.start()
        on_event(router.name, LOADING)
        provisioner = RayProvisioner(file, roster, wanted, RouterAdmin(router.url, key), on_event)
        async with asyncio.TaskGroup() as group:
            ready = group.create_task(follower.until_ready(provisioner, on_event))
            group.create_task(router.until_ready(on_event))
        yield RayFleet(router.url, ready.result(), router, follower, log_dir, provisioner)
    except* StartFailed as failures:
        raise failures.exceptions[0] from None
    finally:
        await asyncio.shield(_stop(router, follower, on_event, hurry or asyncio.Event()))


async def _stop(router: KeptRouter, follower: Follower, on_event: OnEvent, hurry: asyncio.Event) -> None:
    async def hurried() -> None:
        await hurry.wait()
        await router.process.hurry()

    hurrying = asyncio.create_task(hurried())
    try:
        await router.process.stop()
    finally:
        hurrying.cancel()
        await follower.stop_all(on_event)


def wanted_fleet(config: UpConfig, model: str, port: int) -> WantedFleet:
    """Return the fleet to run on Ray; its engines differ only in name and role."""
    simulated = config.simulate is not None
    ranks = ranks_of(config.engine_args)
    cpus = config.engine_cpus if config.engine_cpus is not None else 0.1 if simulated else float(ranks)
    resources = Resources(cpus, config.engine_gpus * ranks, config.engine_memory_gib, config.engines_on_head)
    environment = {key: value for key, value in shared_environment(config).items() if value}
    like = EngineSpec(
        name="", model=model, served_model_name=config.public_name, host="", port=0, dtype=config.dtype,
        built_in=config.model == BUILT_IN, kv_cache_gib=config.kv_cache_gib,
        extra_args=(*lora_flags(config), *config.engine_args), simulate=config.simulate, options=config.options,
    )  # fmt: skip
    engines = tuple(
        WantedEngine(
            msgspec.structs.replace(like, name=name), role, environment, config.engine_restarts, config.log_dir
        )
        for name, role in config.engine_roles
    )
    name = config.fleet_name or f"tercet-{port}"
    return WantedFleet(name, config.ray_address, engines, resources)
