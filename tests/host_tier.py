"""An offloading spec for engines on a CPU, where vLLM has none: its OffloadingConnector keeps KV in host memory by it.

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
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LONGEST_WAIT = 60.0


class HostWorker(OffloadingWorker):
    """Copies blocks between the engine's KV and its own memory, one job after the other, on a thread."""

    def __init__(self, caches: Any, num_chunks: int, seconds: float, waits_for: str) -> None:
        self._kv = [each.tensor for each in caches.tensors]
        self._host = [torch.empty((num_chunks, each.shape[1]), dtype=torch.int8) for each in self._kv]
        self._seconds, self._waits_for = seconds, Path(waits_for) if waits_for else None
        self._jobs = queue.SimpleQueue[tuple[int, Any, Any, bool]]()
        self._done = queue.SimpleQueue[TransferResult]()
        self._left = set[int]()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

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

    def _run(self) -> None:
        while True:
            job_id, device, host, is_store = self._jobs.get()
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
        extra = self.extra_config
        seconds, waits_for = float(extra.get("store_seconds", 0)), str(extra.get("store_waits_for", ""))
        return HostWorker(kv_caches, self.num_chunks, seconds, waits_for)


def offloading(bytes_to_use: int, **more: Any) -> dict[str, Any]:
    """The config of vLLM's OffloadingConnector with this tier."""
    spec = {"spec_name": "HostMemory", "spec_module_path": "tests.host_tier", "cpu_bytes_to_use": bytes_to_use}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {**spec, **more}}
