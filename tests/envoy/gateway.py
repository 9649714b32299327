"""A real Envoy with the shipped configuration, `tercet epp`, and simulated engines, each a process of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from tercet.cluster.child_process import Process
from tercet.cluster.ports import free_ports

SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "envoy"
HOST = "127.0.0.1"
READY_SECONDS = 60.0
TIMEOUT = aiohttp.ClientTimeout(total=60)
TERCET = (sys.executable, "-m", "tercet.cli")
# As docs/envoy.md has it: Envoy trusts whatever certificate the picker shows, as gateways do.
CANDIDATES = "x-test-candidates"
"""A header of requests that a filter before the picker makes candidates of, where a test wants one."""
CANDIDATES_FILTER = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": CANDIDATES,
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                    "type": "STRING",
                },
                "remove": True,
            }
        ],
    },
}
TLS_TO_PICKER = {
    "name": "envoy.transport_sockets.tls",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"]},
    },
}


def envoy_binary() -> str | None:
    """The Envoy of `requirements/envoy.txt`, if it is installed."""
    return shutil.which("envoy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def walk(tree: Any, *keys: Any) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


class Gateway:
    """The processes by name, and a client of Envoy's port. Settings are the shipped ones but for ports."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self.port, self.admin, self.picker_port, self.metrics_port = free_ports(HOST, 4)
        self.engines: dict[str, int] = {}
        self.processes: dict[str, Process] = {}
        self.session = aiohttp.ClientSession(f"http://{HOST}:{self.port}", timeout=TIMEOUT)

    # ---- starting ------------------------------------------------------------------------------------------------

    async def start(self, name: str, *argv: str) -> None:
        # Tests read traces behind Envoy, where a client is not on this machine.
        process = Process(
            name, argv, {"TERCET_CLIENT_TRACES": "1"}, self.directory / f"{name}-{time.monotonic_ns()}.log", grace=5.0
        )
        self.processes[name] = process
        self._stack.push_async_callback(process.stop)
        await process.start()

    async def start_engine(self, name: str, port: int, options: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        self.engines[name] = port
        more = [*flags, *(part for option in options for part in ("--option", option))]
        simulated = ("--simulate", "smollm2-135m-cpu", "--served-model-name", "m", "--name", name)
        await self.start(name, *TERCET, "engine", "--port", str(port), *simulated, *more)

    async def start_picker(self, *flags: str, roles: Mapping[str, str] | None = None) -> None:
        engines = [
            f"--engine=http://{HOST}:{port},name={name},role={(roles or {}).get(name, 'both')}"
            for name, port in self.engines.items()
        ]
        ports = f"--port={self.picker_port}", f"--metrics-port={self.metrics_port}"
        await self.start("picker", *TERCET, "epp", *ports, "--shutdown-timeout=4", *engines, *flags)

    async def start_envoy(
        self,
        fail_open: bool = True,
        duplex: bool = False,
        silence: str = "60s",
        tls: bool = False,
        candidates: bool = False,
    ) -> None:
        self.write_endpoints(self.engines.values())
        config = yaml.safe_load((SHIPPED / "envoy.yaml").read_text())
        listener, (picker, engines) = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"]
        config["admin"]["address"]["socket_address"]["port_value"] = self.admin
        listener["address"]["socket_address"]["port_value"] = self.port
        manager = walk(listener, "filter_chains", 0, "filters", 0, "typed_config")
        route = walk(manager, "route_config", "virtual_hosts", 0, "routes", 0, "route")
        route["retry_policy"]["per_try_idle_timeout"] = silence
        processor = walk(manager, "http_filters", 0, "typed_config")
        processor["failure_mode_allow"] = fail_open
        if duplex:
            streamed = {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
            processor["processing_mode"] |= streamed
        if candidates:
            manager["http_filters"].insert(0, CANDIDATES_FILTER)
        if tls:
            picker["transport_socket"] = TLS_TO_PICKER
        endpoint = walk(picker, "load_assignment", "endpoints", 0, "lb_endpoints", 0, "endpoint")
        endpoint["address"]["socket_address"]["port_value"] = self.picker_port
        engines["eds_cluster_config"]["eds_config"]["path_config_source"] = {
            "path": str(self.directory / "endpoints.yaml"), "watched_directory": {"path": str(self.directory)}
        }  # fmt: skip
        file = self.directory / "envoy.yaml"
        file.write_text(yaml.safe_dump(config))
        binary = envoy_binary()
        assert binary is not None
        await self.start("envoy", binary, "-c", str(file), "--concurrency", "1", "--base-id", str(os.getpid() % 60000))

    def write_endpoints(self, ports: Any) -> None:
        """As an operator does: a whole new file over the old one."""
        config = yaml.safe_load((SHIPPED / "endpoints.yaml").read_text())
        config["version_info"] = str(time.monotonic_ns())
        config["resources"][0]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": HOST, "port_value": port}}}} for port in ports
        ]
        new = self.directory / "endpoints.new"
        new.write_text(yaml.safe_dump(config))
        new.rename(self.directory / "endpoints.yaml")

    # ---- waiting -------------------------------------------------------------------------------------------------

    async def until_ready(self, engines: int) -> None:
        """All engines answer, the picker picks among them, and Envoy serves."""
        for port in self.engines.values():
            await self._until(lambda port=port: self._get(f"http://{HOST}:{port}/health"))
        await self.until_picked_among(engines)
        await self._until(lambda: self._get(f"http://{HOST}:{self.admin}/ready"))
        await self._until(self._healthy)

    async def until_picked_among(self, engines: int) -> None:
        await self._until(lambda: self.metric_is('inference_pool_ready_pods{name="tercet"}', float(engines)))

    async def metric_is(self, name: str, value: float) -> bool:
        return (await self.metrics()).get(name) == value

    async def metrics(self) -> dict[str, float]:
        """The picker's."""
        async with aiohttp.request("GET", f"http://{HOST}:{self.metrics_port}/metrics", timeout=TIMEOUT) as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def _healthy(self) -> bool:
        """Whether Envoy has found the picker and all engines healthy."""
        async with aiohttp.request("GET", f"http://{HOST}:{self.admin}/clusters", timeout=TIMEOUT) as answer:
            flags = [line for line in (await answer.text()).splitlines() if "::health_flags::" in line]
        return len(flags) == 1 + len(self.engines) and all(line.endswith("::healthy") for line in flags)

    async def _get(self, url: str) -> bool:
        async with aiohttp.request("GET", url, timeout=TIMEOUT) as answer:
            return answer.status == 200

    async def _until(self, holds: Any) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                if await holds():
                    return
            except (aiohttp.ClientError, OSError):
                pass
            if time.monotonic() > deadline:
                logs = "\n".join(file.read_text()[-2000:] for file in self.directory.glob("*.log"))
                raise AssertionError(f"not ready within {READY_SECONDS} s:\n{logs}")
            await asyncio.sleep(0.1)

    # ---- faults --------------------------------------------------------------------------------------------------

    def signal(self, name: str, number: int) -> None:
        """To the process itself, not to the guard that watches over it."""
        guard = self.processes[name].pid
        assert guard is not None
        for child in psutil.Process(guard).children(recursive=True):
            child.send_signal(number)

    # ---- asking --------------------------------------------------------------------------------------------------

    async def complete(self, prompt: Any = "tell me", **fields: Any) -> tuple[int, Any]:
        """Status and answer of one completion."""
        headers = fields.pop("headers", {})
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, **fields}
        async with self.session.post("/v1/completions", json=body, headers=headers) as answer:
            text = await answer.text()
        return answer.status, yaml.safe_load(text) if text.startswith("{") else text

    @asynccontextmanager
    async def streamed(self, prompt: str, tokens: int) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A streaming completion, whose headers have come."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True}
        async with self.session.post("/v1/completions", json=body) as answer:
            yield answer

    async def running(self, name: str) -> float:
        """What an engine says that it runs."""
        url = f"http://{HOST}:{self.engines[name]}/metrics"
        async with aiohttp.request("GET", url, timeout=TIMEOUT) as answer:
            lines = (await answer.text()).splitlines()
        return float(next(line for line in lines if line.startswith("vllm:num_requests_running")).rsplit(" ", 1)[1])

    async def served_by(self, name: str) -> int:
        """How many requests Envoy has sent to an engine."""
        async with aiohttp.request("GET", f"http://{HOST}:{self.admin}/clusters", timeout=TIMEOUT) as answer:
            lines = (await answer.text()).splitlines()
        counted = f"engines::{HOST}:{self.engines[name]}::rq_total::"
        return next(int(line.removeprefix(counted)) for line in lines if line.startswith(counted))

    async def who_runs(self) -> str:
        """The one engine that runs something, once one does."""
        found: list[str] = []

        async def look() -> bool:
            found[:] = [name for name in self.engines if await self.running(name)]
            return len(found) == 1

        await self._until(look)
        return found[0]


@asynccontextmanager
async def gateway(directory: Path) -> AsyncGenerator[Gateway]:
    async with AsyncExitStack() as stack:
        made = Gateway(directory, stack)
        stack.push_async_callback(made.session.close)
        yield made
