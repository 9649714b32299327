"""The cost of engines on Ray, and a check that a fleet on Ray grows and shrinks without a failed request.

    python -m benchmarks.ray_fleet [ENGINES [SMALL [CLIENTS]]]

The script starts a cluster of a head and two nodes at loopback addresses, with ENGINES simulated engines. It scales
them to SMALL and back while CLIENTS clients read streams; each stream must be complete. Memory is the proportional set
size, which divides shared memory among the processes that share it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress

import psutil
from tests.unit.cluster.on_ray.ray_cluster import ray_cluster
from tests.unit.cluster.whole_streams import streams

from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.scaling.decide import ScaleCall
from tercet.cluster.scaling.scaler import Scaler, control_socket, scale_fleet, scaling_of
from tercet.cluster.up_config import UpConfig
from tercet_ray.ray_fleet import ray_fleet

KINDS = {"ray::EngineOwner": "owner", "guard.py": "guard", "tercet.cli engine": "engine", "serve_router": "router"}
MARK = "TERCET_BENCHMARK"


def unsaid(*words: object) -> None:
    """Ignore progress messages."""


async def main(engines: int, small: int, clients: int) -> None:
    """Start the cluster, scale the fleet, and print the results."""
    os.environ[MARK] = str(os.getpid())
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    with ray_cluster(nodes=2) as cluster, tempfile.TemporaryDirectory() as logs:
        config = UpConfig(
            on=f"ray:{cluster.address}", port=0, log_dir=logs, fleet_name="many", max_instances=engines,
            pd_ratio="1:3", engine_cpus=0.02, simulate="llama-3.1-8b-h100-tp1",
        )  # fmt: skip
        said: list[str] = []
        began = time.monotonic()
        async with ray_fleet(config, model, lambda name, state: said.append(f"{name}: {state}")) as fleet:
            print(f"{engines} engines are ready after {time.monotonic() - began:.0f} s; MiB: {memory()}", flush=True)
            keeping = asyncio.create_task(fleet.until_broken(unsaid))
            async with Scaler(fleet.provisioner, unsaid) as scaler, control_socket(scaler) as socket:
                async with streams(fleet.url, clients) as reading:
                    for count in (small, engines):
                        began = time.monotonic()
                        prefill = max(1, count // 4)
                        record = await scale_fleet(socket, ScaleCall(prefill=prefill, decode=count - prefill))
                        while record.state == "under_way":
                            await asyncio.sleep(0.2)
                            record = await scaling_of(socket)
                        print(f"{count} engines: {record.state} after {time.monotonic() - began:.0f} s", flush=True)
                print(f"{reading.whole} streams, all whole; load average {os.getloadavg()[0]:.0f}")
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


def memory() -> str:
    """Return the mean memory of each kind of process, in MiB, as text."""
    found, count = Counter[str](), Counter[str]()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(process.cmdline())
            kind = next((KINDS[part] for part in KINDS if part in command), None)
            if kind is not None and process.environ().get(MARK) == os.environ[MARK]:
                found[kind] += process.memory_full_info().pss
                count[kind] += 1
    return ", ".join(f"{kind} {found[kind] / count[kind] / 2**20:.0f} ({count[kind]})" for kind in count)


if __name__ == "__main__":
    asyncio.run(main(*map(int, (*sys.argv[1:], *("20", "5", "8")[len(sys.argv) - 1 :]))))
