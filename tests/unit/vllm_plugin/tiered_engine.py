"""A tiny engine with siblings of Tercet's connector, and memory in the place of KV: what is where is a block's hash.

Its steps compute, its tier (vLLM's OffloadingConnector, whose worker is here) copies some steps later, and what reads
or writes a block in the wrong moment is seen in the memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import get_offload_block_hash
from vllm.v1.kv_offload.tiering.async_lookup import LookupPhase
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from tercet.vllm_plugin.core.connector_messages import StepMetadata, step_in
from tercet.vllm_plugin.start.siblings_config import with_siblings
from tests.host_tier import offloading

from .tiny_engine import FULL, NEXT_TOKEN, TinyEngine

CHUNK_BYTES = 4096 * ((FULL.page_size_bytes + 4095) // 4096)
HOST_TIER = offloading(200 * CHUNK_BYTES)
HASH_BYTES = 32
LONGEST_WAIT = 60.0


def tier_with_files(folder: Path, chunks: int) -> dict[str, Any]:
    """A tier of so many blocks in host memory, and all of them in vLLM's tier of files."""
    return offloading(chunks * CHUNK_BYTES, folder)


def with_beside(config: VllmConfig, siblings: Sequence[dict[str, Any]]) -> VllmConfig:
    """The config of a tiny engine with these siblings, which publishes KV events to nobody."""
    given = copy.copy(config)
    assert config.kv_transfer_config is not None
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_connector_extra_config = {"beside": list(siblings)}
    given.kv_transfer_config = with_siblings(transfer)
    given.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    given.scheduler_config = copy.copy(config.scheduler_config)
    given.scheduler_config.disable_hybrid_kv_cache_manager = True
    return given


class Region:
    """A host tier's memory that vLLM's tier of files reads and writes, with a block's hash in the place of its KV."""

    def __init__(self, view: memoryview) -> None:
        assert view.strides is not None
        self._bytes, self._stride = view.cast("B"), view.strides[0]

    def __getitem__(self, chunk: int) -> bytes:
        at = chunk * self._stride
        return bytes(self._bytes[at : at + HASH_BYTES])

    def update(self, copied: Iterable[tuple[int, Any]]) -> None:
        for chunk, value in copied:
            at = chunk * self._stride
            kept = value if isinstance(value, bytes) else str(value).encode()
            self._bytes[at : at + HASH_BYTES] = kept.ljust(HASH_BYTES)[:HASH_BYTES]

    def release(self) -> None:
        self._bytes.release()


class TieredEngine(TinyEngine):
    """`delay` is the number of steps that a store takes to read. One with files below its tier is to be closed."""

    def __init__(self, config: VllmConfig, siblings: Sequence[dict[str, Any]] = (HOST_TIER,), delay: int = 0) -> None:
        super().__init__(with_beside(config, siblings), extra_config=None)
        self.delay = delay
        self.memory: dict[int, Any] = {}
        multi: Any = self.scheduler.get_kv_connector()
        managers = [half.manager for each in multi._connectors if (half := getattr(each, "connector_scheduler", None))]
        self._files = [tier for manager in managers for tier in getattr(manager, "secondary_tiers", ())]
        self.tier: dict[int, Any] | Region = {}
        if self._files:
            self.tier = Region(managers[0].primary_tier.get_kv_memoryview())
        # Steps left, the job's id and its two sides; loads go at once.
        self._stores: list[list[Any]] = []
        self.wrong = list[str]()
        self.stored = self.loaded = 0
        self.invalid = set[int]()
        """Blocks whose load the next step reports as failed."""

    def step(self, runs: Any = lambda _: None) -> tuple[SchedulerOutput, StepMetadata]:
        self._await_files()
        output = self.scheduler.schedule()
        metadata = step_in(output.kv_connector_metadata)
        assert metadata is not None
        runs(output)
        done = self._copies(output)
        self._compute(output)
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[each] for each in ids]
        sampled = [[NEXT_TOKEN] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        worker: Any = None
        if done[0]:
            worker = self._worker_metadata(OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done[0], 1)))
        told = KVConnectorOutput(finished_recving=done[1], kv_connector_worker_meta=worker)
        told.invalid_block_ids, self.invalid = self.invalid, set()
        indices = {request_id: index for index, request_id in enumerate(ids)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(ids, indices, sampled, kv_connector_output=told)
        )  # fmt: skip
        return output, metadata

    def _await_files(self) -> None:
        """Return when the tier's threads have done what earlier steps asked for: then schedules are deterministic."""
        deadline = time.monotonic() + LONGEST_WAIT
        for tier in self._files:
            tier.drain_jobs()
            lookups = tier._lookup_manager
            while any(each.phase is LookupPhase.IN_FLIGHT for each in lookups._lookup_state.values()):
                assert time.monotonic() < deadline
                time.sleep(0)  # another thread's turn
                lookups.drain_results()

    def close(self) -> None:
        if isinstance(self.tier, Region):
            self.tier.release()
        self.scheduler.shutdown()

    def _worker_metadata(self, found: OffloadingWorkerMetadata) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

        return MultiKVConnectorWorkerMetadata((None, found))

    def _compute(self, output: SchedulerOutput) -> None:
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            self._fill(request, request.num_computed_tokens, request_id)

    def _fill(self, request: Request, computed: int, request_id: str) -> None:
        for at, block in enumerate(self.blocks_of(request_id)):
            if at < len(request.block_hashes) and (at + 1) * FULL.block_size <= computed:
                self.memory[block] = request.block_hashes[at]

    def _copies(self, output: SchedulerOutput) -> tuple[list[int], set[str]]:
        """Do what a worker of the tier does before and in a step; the jobs that are done, and the requests loaded."""
        parts = getattr(output.kv_connector_metadata, "metadata", ())
        (planned,) = [part for part in parts if hasattr(part, "store_jobs")] or [None]
        done, received = list[int](), set[str]()
        if planned is None:
            return done, received
        for job_id, job in planned.store_jobs.items():
            source, target = job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist()
            self._stores.append([self.delay, job_id, source, target, None])
        flushed = planned.jobs_to_flush or ()
        for store in list(self._stores):
            _, job_id, source, target, promised = store
            if store[4] is None and job_id not in planned.store_jobs:
                promised = store[4] = [self.memory.get(block) for block in source]
            if job_id in flushed or (store[0] <= 0 and job_id not in planned.store_jobs):
                found = [self.memory.get(block) for block in source]
                if promised is not None and promised != found:
                    self.wrong.append(f"job {job_id}: blocks {source} were rewritten while they were read")
                self.tier.update(zip(target, found, strict=True))
                self._stores.remove(store)
                self.stored += len(source)
                done.append(job_id)
            store[0] -= 1
        for job_id, job in planned.load_jobs.items():
            request = self.scheduler.requests[job.req_id]
            wanted = self.blocks_of(job.req_id)
            for one, other in zip(
                job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True
            ):  # fmt: skip
                self.memory[other] = self.tier[one]
                if self.tier[one] != request.block_hashes[wanted.index(other)]:
                    self.wrong.append(f"load of {job.req_id}: block {other} has KV of other tokens")
                self.loaded += 1
            done.append(job_id)
            received.add(job.req_id)
        return done, received

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_requests()

    def settle(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(200):
            if self.is_idle:
                return
            self.step()
        raise AssertionError("the engine does not become idle")

    def write(self, lease: str, value: Any) -> None:
        """A peer writes all blocks of an open lease."""
        grant = self.agent.granted[lease]
        for blocks in grant.blocks:
            for block in blocks:
                self.memory[block] = value


def job_hashes(half: Any) -> list[bytes]:
    return [get_offload_block_hash(key) for job in half._jobs.values() for key in job.keys]
