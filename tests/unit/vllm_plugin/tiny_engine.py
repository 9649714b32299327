"""vLLM's own scheduler, KV cache manager and block pool with Tercet's connector: all of an engine but a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec import structs
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from tercet.engine.interface import KeyedPrompt, PinnedPrefix, ReservedBlocks, SendPlan, SeqParams
from tercet.protocol import EngineError, KVLayout, content_of, packed
from tercet.protocol.addresses import RankRegion
from tercet.transport import (
    CancelSend,
    ExtendLease,
    GrantLease,
    HeadSlice,
    Push,
    PushCached,
    RevokeLease,
    SendDestination,
)
from tercet.vllm_plugin.connector import TercetConnector
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.cache_groups import NO_BLOCK
from tercet.vllm_plugin.core.connector_messages import StepMetadata, TercetParams, WorkerHandshake
from tercet.vllm_plugin.edge.adapters import Adapters

# Of an engine that was started without LoRA.
NO_ADAPTERS = Adapters(lambda: cast(Any, None), 0)
BLOCK = 16
# One of them is vLLM's null block.
NUM_BLOCKS = 33
MAX_BATCHED = 64
# What the model that is not there says.
NEXT_TOKEN = 7
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
LAYOUT = KVLayout(
    model="m", dtype="float32", num_layers=1, num_kv_heads=1, head_size=8, block_size=16, block_bytes=1024, tp_size=1,
    packing="cpu-vec", splits_by_head=True, splits_by_token=True,
)  # fmt: skip
ADDED = {core_methods.name_of(method): core_methods.answering(method) for method in core_methods.METHODS}


def crossed(value: Any) -> Any:
    """As it arrives in another process of vLLM's."""
    return MsgpackDecoder().decode(MsgpackEncoder().encode(value))


def tiny_config(directory: Path) -> VllmConfig:
    """An engine's config of a model that has no weights."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=512),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=MAX_BATCHED, max_model_len=512, is_encoder_decoder=False,
            enable_chunked_prefill=True, async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="TercetConnector", kv_connector_module_path="tercet.vllm_plugin.connector", kv_role="kv_both"
        ),
    )  # fmt: skip


class FakeAgent:
    """In the place of one rank's agent; ``received`` is how far each lease's KV has arrived.

    It carries commands out in order, when it is not ``frozen``; what it fails at it says.
    """

    def __init__(self) -> None:
        self.granted: dict[str, GrantLease] = {}
        self.ended: set[str] = set()
        self.received: dict[str, int] = {}
        self.pushed: list[PushCached] = []
        self.cancelled: list[str] = []
        self.fails_at: type | None = None
        self.frozen = False
        self._posted: list[tuple[Any, asyncio.Future[Any]]] = []

    def call(self, command: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._posted.append((command, answer))
        self._carry_out()
        return answer

    def thaw(self) -> None:
        self.frozen = False
        self._carry_out()

    def _carry_out(self) -> None:
        while self._posted and not self.frozen:
            command, answer = self._posted.pop(0)
            try:
                found = self.do(command)
            except EngineError as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(found)

    def do(self, command: Any) -> Any:
        if self.fails_at is not None and isinstance(command, self.fails_at):
            raise EngineError("out of memory")
        match command:
            case GrantLease():
                if command.lease in self.ended:
                    raise EngineError("granted before")
                self.granted[command.lease] = command
                self.received.setdefault(command.lease, command.begin)
            case ExtendLease():
                grant = self.granted[command.lease]
                for new, had in zip(command.blocks, grant.blocks, strict=True):
                    assert all(one in (other, NO_BLOCK) for one, other in zip(new, had, strict=False))
                self.granted[command.lease] = structs.replace(
                    grant, blocks=command.blocks, end=command.end, tokens=command.tokens
                )
            case RevokeLease():
                self.ended.add(command.lease)
                return self.received[command.lease] if self.granted.pop(command.lease, None) else 0
            case CancelSend():
                self.cancelled.append(command.send_id)
            case PushCached():
                self.pushed.append(command)
            case _:
                raise AssertionError(command)
        return None


class TinyEngine:
    """One engine core without a model; what the HTTP verbs ask of it goes through its own added methods.

    ``retention`` is vLLM's, of blocks that have left a window: 0 is its default, None keeps all of them.
    """

    def __init__(
        self, config: VllmConfig, extra_config: dict[str, Any] | None = None, words: tuple[str, int] = ("", 0),
        scheduler: type[Scheduler] = Scheduler, specs: Sequence[KVCacheSpec] = (FULL,),
        retention: int | None = 0,
    ) -> None:  # fmt: skip
        transfer = config.kv_transfer_config
        assert transfer is not None
        if transfer.kv_connector == "TercetConnector":
            transfer.kv_connector_extra_config = extra_config or {}
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        keeps_states = any(isinstance(spec, MambaSpec) for spec in specs)
        config.cache_config.mamba_cache_mode = "align" if keeps_states else "none"
        groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
        caches = KVCacheConfig(NUM_BLOCKS, [], groups, prefix_cache_retention_interval=retention)
        self.scheduler = scheduler(config, caches, StructuredOutputManager(config), BLOCK, BLOCK, log_stats=True)
        found = self.scheduler.get_kv_connector()
        connector = getattr(found, "tercet", found)
        assert isinstance(connector, TercetConnector)
        self.connector = connector
        connector.handshakes = [
            WorkerHandshake([], ("", ""), ("", ""), LAYOUT, RankRegion((LAYOUT.num_layers,)), words)
        ]
        self.agent = FakeAgent()
        self.side = connector.attach(self.scheduler)
        init_none_hash(sha256)
        self.core: Any = SimpleNamespace(
            scheduler=self.scheduler,
            request_block_hasher=get_request_block_hasher(BLOCK, sha256),
            model_executor=SimpleNamespace(is_sleeping=False),
        )

    # ---- the added methods -----------------------------------------------------------------------------------------

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        """As the core answers the API server's process; what crosses is encoded as vLLM does it."""
        found = ADDED[name](self.core, *crossed(args))
        return crossed(await asyncio.wrap_future(found) if isinstance(found, Future) else found)

    def reserve(self, lease: str, tokens: list[int], salt: str | None = None) -> int:
        """Reserve now or not at all, and let the agent know, as the verbs do; the matched length."""
        waiting = core_methods.reserve(self.core, lease, KeyedPrompt(tokens, salt))
        core_methods.give_up(self.core, lease)
        return self.granted(lease, tokens, waiting, salt)

    def granted(
        self, lease: str, tokens: list[int], answer: Future[ReservedBlocks], salt: str | None = None
    ) -> int:  # fmt: skip
        """Take the answer to ``reserve``, and let the agent know."""
        found = answer.result(0)
        matched = found.matched_len
        end, size = len(tokens), found.block_size
        self.agent.do(GrantLease(lease, found.blocks, matched, end, size, packed(tokens), salt, "tcp://127.0.0.1:1"))
        return matched

    def extend(self, lease: str, tokens: list[int], salt: str | None = None) -> ReservedBlocks:
        return core_methods.extend(self.core, lease, KeyedPrompt(tokens, salt)).result(0)

    def commit(self, lease: str, valid_end: int, tokens: list[int] | None = None) -> None:
        """KV of the lease's first tokens, or of others, has arrived."""
        grant = self.agent.granted.get(lease)
        known = packed(tokens or []) if tokens is not None or grant is None else grant.tokens
        core_methods.commit(self.core, lease, content_of(known, grant.salt if grant is not None else None, valid_end))

    def release(self, lease: str) -> int:
        return core_methods.release(self.core, lease, self.agent.do(RevokeLease(lease)))

    def push_cached(self, tokens: list[int], send: SendPlan, salt: str | None = None) -> Push | None:
        found = core_methods.push_cached(self.core, KeyedPrompt(tokens, salt), send)
        return None if found is None else found[0]

    def push_longest(self, tokens: list[int], send: SendPlan) -> PinnedPrefix:
        return core_methods.push_longest(self.core, KeyedPrompt(tokens), send)

    def end_send(self, send_id: str) -> None:
        core_methods.end_send(self.core, send_id)

    def status(self) -> dict[str, Any]:
        return core_methods.status(self.core)

    # ---- requests and steps ----------------------------------------------------------------------------------------

    def add(
        self, request_id: str, tokens: list[int], max_tokens: int = 3, salt: str | None = None,
        lease: str | None = None, output: list[int] | None = None, send: SendPlan | None = None,
        token: str | None = None, valid_end: int | None = None, number: int = 0, background: bool = False,
        **sampling: Any,
    ) -> Request:  # fmt: skip
        seq = None
        if lease is not None or output or number:
            if lease is not None and valid_end is None:
                valid_end = self.agent.do(RevokeLease(lease))
            seq = SeqParams(lease, valid_end or 0, output or [], number)
        params = TercetParams(token or self.connector.token, send, seq, background).to_kv_transfer_params()
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, temperature=0, extra_args={"kv_transfer_params": params}, **sampling
            ),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.core.request_block_hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, runs: Callable[[SchedulerOutput], None] = lambda _: None) -> tuple[SchedulerOutput, StepMetadata]:
        """One engine step, in which every request whose prompt is done gets a token; ``runs`` is what workers do."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        runs(output)
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            sampled.append([NEXT_TOKEN] if request.num_computed_tokens >= request.num_tokens else [])
        indices = {request_id: index for index, request_id in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, indices, sampled))
        return output, metadata

    def run(self, request: Request) -> list[int]:
        """Step until ``request`` is over; its output."""
        for _ in range(100):
            if request.is_finished():
                return list(request.output_token_ids)
            self.step()
        raise AssertionError("the request does not end")

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.step()

    # ---- blocks ----------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def blocks_of(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def cached(self, tokens: list[int], salt: str | None = None) -> int:
        """How many of the tokens a new request would find in the prefix cache."""
        probe = Request(
            request_id="probe", prompt_token_ids=[*tokens, 0], sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None, cache_salt=salt, block_hasher=self.core.request_block_hasher,
        )  # fmt: skip
        return self.scheduler.kv_cache_manager.get_computed_blocks(probe)[1]

    def assert_nothing_held(self) -> None:
        status = self.status()
        assert (status["free_blocks"], status["leases"], status["sends"]) == (NUM_BLOCKS - 1, 0, 0)
        assert (status["running"], status["waiting"]) == (0, 0)
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not manager.req_to_blocks
            assert not manager.num_cached_block
        assert not self.agent.granted
        assert len(self.side.queue) == 0
        assert len(self.side.resumed) == 0


def tokens_of(length: int, start: int = 10) -> list[int]:
    return list(range(start, start + length))


def send_of(send_id: str, begin: int, end: int, base: int = 0) -> SendPlan:
    to = [[SendDestination(("tcp://127.0.0.1:2",), HeadSlice(0, 1, 0, 1))]]
    whose = content_of(packed(tokens_of(end)), None)
    return SendPlan(send_id, "f" * 32, whose, base, begin, end, to, "tcp://127.0.0.1:1")
