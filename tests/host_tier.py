"""Offloading specs for engines on a CPU, where vLLM has none: its OffloadingConnector keeps KV in host memory by them.

`store_seconds` in the connector's settings is how long each store waits before it reads, as behind a busy queue of
copies on a device. A file named by `store_waits_for` holds stores back instead, until it is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

LONGEST_WAIT = 60.0


class HostWorker(OffloadingWorker):
    """Copies blocks between the engine's KV and the tier's memory, one job after the other, on a thread.

    The memory is the worker's, or the `region` that the scheduler's process reads and writes, too.
    """

    def __init__(self, spec: CPUOffloadingSpec, caches: Any, region: SharedOffloadRegion | None = None) -> None:
        waits_for = str(spec.extra_config.get("store_waits_for", ""))
        self._seconds = float(spec.extra_config.get("store_seconds", 0))
        self._waits_for = Path(waits_for) if waits_for else None
        self._kv = [each.tensor for each in caches.tensors]
        self._host = [
            region.create_next_worker_view(each.shape[1])
            if region is not None
            else torch.empty((spec.num_chunks, each.shape[1]), dtype=torch.int8)
            for each in self._kv
        ]
        self._region = region
        self._jobs = queue.SimpleQueue[tuple[int, Any, Any, bool] | None]()
        self._done = queue.SimpleQueue[TransferResult]()
        self._left = set[int]()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, False)

    def _submit(self, job_id: int, device: Any, host: Any, is_store: bool) -> bool:
        with self._changed:
            self._left.add(job_id)
        self._jobs.put((job_id, device, host, is_store))
        return True

    def get_finished(self) -> list[TransferResult]:
        found = list[TransferResult]()
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._left & job_ids, LONGEST_WAIT)

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join(LONGEST_WAIT)
        if self._region is not None and not self._thread.is_alive():
            self._host.clear()
            self._region.cleanup()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, device, host, is_store = job
            if is_store:
                time.sleep(self._seconds)
                deadline = time.monotonic() + LONGEST_WAIT
                while self._waits_for is not None and self._waits_for.exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
            for one, other in zip(device.block_ids.tolist(), host.block_ids.tolist(), strict=True):
                for kv, kept in zip(self._kv, self._host, strict=True):
                    if is_store:
                        kept[other].copy_(kv[one])
                    else:
                        kv[one].copy_(kept[other])
            size = len(device.block_ids) * sum(each.shape[1] for each in self._kv)
            self._done.put(TransferResult(job_id, True, size, self._seconds))
            with self._changed:
                self._left.discard(job_id)
                self._changed.notify_all()


class HostMemory(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> HostWorker:
        return HostWorker(self, kv_caches)


class HostMemoryAndFiles(TieringOffloadingSpec):
    """Host memory over tiers of vLLM's, as its files: these copy between themselves and the shared region."""

    def get_manager(self) -> OffloadingManager:
        manager, region = super().get_manager(), self._scheduler_mmap
        assert region is not None
        # By now the workers have mapped it, too. Engines end by SIGKILL, which would leave the file.
        Path(region.mmap_path).unlink(missing_ok=True)
        region._creator = False
        return manager

    def get_worker(self, kv_caches: Any) -> HostWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
        )  # fmt: skip
        region._creator = False  # who removes the file: see above
        return HostWorker(self, kv_caches, region)


def offloading(bytes_to_use: int, files: Path | None = None, **more: Any) -> dict[str, Any]:
    """The config of vLLM's OffloadingConnector with a tier in host memory, and one in a folder of files below it."""
    spec = {"spec_name": "HostMemory", "spec_module_path": "tests.host_tier", "cpu_bytes_to_use": bytes_to_use}
    if files is not None:
        below = {"type": "fs", "root_dir": str(files), "n_read_threads": 2, "n_write_threads": 2}
        spec |= {"spec_name": "HostMemoryAndFiles", "secondary_tiers": [{**below, "enable_kv_events": True}]}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {**spec, **more}}
