"""Calls from the API server's process to the engine's core: methods that the general plugin adds to ``EngineCore``.

vLLM runs a utility call on the core's thread, between two engine steps. If the call returns a future, vLLM answers when
the future is done. Expected failures are returned as values, since vLLM would log an exception as a fault of the
engine: :meth:`CoreCalls.call` raises them at the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, get_args, get_origin, get_type_hints

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request as VLLMRequest
from vllm.v1.request import RequestStatus

from tercet.engine.interface import (
    EngineDescription,
    KeyedPrompt,
    PinnedPrefix,
    RequestInCore,
    ReservedBlocks,
    SendPlan,
)
from tercet.protocol import Content, EngineError, TercetError, from_wire
from tercet.protocol.types import Paused
from tercet.transport import Push
from tercet.transport.sockets import bounded
from tercet.vllm_plugin.connector import TercetConnector
from tercet.vllm_plugin.core.cache_groups import GroupTables
from tercet.vllm_plugin.core.connector_messages import REQUEST_PREFIX
from tercet.vllm_plugin.core.reservations import FILLER_TOKEN
from tercet.vllm_plugin.core.scheduler_side import SchedulerSide
from tercet.vllm_plugin.edge.adapters import to_lora_request
from tercet.vllm_plugin.hooks import Method, wrap
from tercet.vllm_plugin.mm_features import to_specs

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")
Args = TypeVarTuple("Args")


# ---- the methods; those of the verbs do what ``SchedulerHalf`` says --------------------------------------------------


def describe(core: EngineCore) -> EngineDescription:
    """Attach to the scheduler, and return its description. Raises :class:`EngineError` without the connector."""
    tables = _side(core).tables
    connector = _connector(core)
    ranks, settings = connector.handshakes, connector.settings
    # The addresses that the publisher has bound, which the settings do not say: a port may be any free one.
    publisher, kv_events = _scheduler(core).kv_event_publisher, None
    if isinstance(publisher, ZmqEventPublisher) and publisher._pub is not None:
        replay = publisher._replay
        kv_events = {
            "endpoint": publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT),
            "replay": None if replay is None else replay.getsockopt_string(zmq.LAST_ENDPOINT),
            "topic": publisher.get_publisher_config().topic,
        }
    return EngineDescription(
        transports=[rank.transports for rank in ranks],
        agents=[rank.agent for rank in ranks],
        workers=[rank.life for rank in ranks],
        layout=ranks[0].layout,
        token=connector.token,
        lease_ttl=settings.lease_ttl,
        reserve_wait=settings.reserve_wait,
        kv_events=kv_events,
        tables=None if tables is None else tables.place,
        host=connector.inner_host,
        regions=[rank.region for rank in ranks],
    )


def reserve(core: EngineCore, lease: str, prompt: KeyedPrompt) -> Future[ReservedBlocks]:
    """Reserve blocks for all tokens of a prompt, in order of arrival."""
    owner = _placeholder(core, f"tercet-lease-{lease}", prompt)
    return _side(core).reserve(lease, owner, prompt)


def extend(core: EngineCore, lease: str, prompt: KeyedPrompt) -> Future[ReservedBlocks]:
    """Reserve more blocks for an open lease; return all its blocks."""
    owner = _placeholder(core, f"tercet-lease-{lease}", prompt)
    return _side(core).extend(lease, owner, prompt)


def give_up(core: EngineCore, lease: str) -> None:
    """End the wait of a reservation that has not been answered."""
    _side(core).give_up(lease)


def commit(core: EngineCore, lease: str, valid: Content) -> None:
    """Make received KV available in the prefix cache."""
    _side(core).reservations.commit(lease, valid)
    _publish_now(core)


def release(core: EngineCore, lease: str, valid_end: int) -> int:
    """Free the blocks of a lease that no peer writes any more."""
    side = _side(core)
    side.give_up(lease)  # it may still wait: for blocks, or for siblings that use them
    valid_end = side.reservations.release(lease, valid_end)
    side.queue.admit()
    _publish_now(core)
    return valid_end


def push_cached(core: EngineCore, prompt: KeyedPrompt, send: SendPlan) -> list[Push] | None:
    """Pin KV that is fully cached, and return the pushes."""
    sought = _placeholder(core, f"tercet-probe-{send.send_id}", prompt)
    return _side(core).sends.push_cached(sought, send)


def push_longest(core: EngineCore, prompt: KeyedPrompt, send: SendPlan) -> PinnedPrefix:
    """Pin the longest cached whole blocks of a send."""
    sought = _placeholder(core, f"tercet-probe-{send.send_id}", prompt)
    return _side(core).sends.push_longest(sought, send)


def end_send(core: EngineCore, send_id: str) -> None:
    """Unpin the blocks of a send, which no agent reads any more."""
    side = _side(core)
    side.sends.end(send_id)
    side.queue.admit()


def status(core: EngineCore) -> dict[str, Any]:
    """Return the load and the leases and sends of this engine, as fields of :class:`~tercet.protocol.EngineStatus`."""
    side, scheduler = _side(core), _scheduler(core)
    pool = scheduler.kv_cache_manager.block_pool
    running, waiting = scheduler.get_request_counts()
    # Which sequences wait until the engine is resumed: by vLLM's pauses and by its sleep, which also pauses.
    state = PauseState.PAUSED_ALL if core.model_executor.is_sleeping else core.scheduler.pause_state
    paused: Paused = "all" if state == PauseState.PAUSED_ALL else "" if state == PauseState.UNPAUSED else "new"
    return {
        "total_blocks": pool.num_gpu_blocks - 1,
        "free_blocks": pool.get_num_free_blocks(),
        "running": running,
        "waiting": waiting,
        "kv_cache_usage": pool.get_usage(),
        "leases": len(side.reservations),
        "sends": len(side.sends),
        "paused": paused,
    }


def sequences(core: EngineCore) -> list[RequestInCore]:
    """Return every request of this engine's edge, by the edge's id: its number of blocks, and whether it runs.

    Preempted requests wait, without blocks. Relies on vLLM making its id from a request's id, a dash and a suffix.
    """
    scheduler = _scheduler(core)
    tables = GroupTables(scheduler.kv_cache_manager)
    return [
        RequestInCore(
            "-".join(request_id.split("-")[:2]), tables.held(request_id), request.status == RequestStatus.RUNNING
        )
        for request_id, request in scheduler.requests.items()
        if request_id.startswith(REQUEST_PREFIX)
    ]


def forget_grammar_backend(core: EngineCore) -> None:
    """Make the next structured output choose the engine's grammar backend, unless the engine's flags name one.

    The first structured output chooses for all, by what its grammar needs. Call this while none runs.
    """
    manager: Any = core.structured_output_manager
    if manager.vllm_config.structured_outputs_config.backend == "auto":
        manager.backend = None
        if hasattr(manager, "backend_name"):
            manager.backend_name = None


METHODS = (
    describe,
    reserve,
    extend,
    give_up,
    commit,
    release,
    push_cached,
    push_longest,
    end_send,
    status,
    sequences,
    forget_grammar_backend,
)


def _scheduler(core: EngineCore) -> Scheduler:
    if not isinstance(core.scheduler, Scheduler):
        raise EngineError(f"the scheduler is {type(core.scheduler).__name__}; Tercet needs vLLM's own Scheduler")
    return core.scheduler


def _connector(core: EngineCore) -> TercetConnector:
    connector: Any = core.scheduler.get_kv_connector()
    connector = getattr(connector, "tercet", connector)  # as tercet.vllm_plugin.siblings has it
    if not isinstance(connector, TercetConnector):
        raise EngineError("this engine runs without TercetConnector: start it with the documented --kv-transfer-config")
    return connector


def _side(core: EngineCore) -> SchedulerSide:
    return _connector(core).attach(_scheduler(core))


def _placeholder(core: EngineCore, request_id: str, prompt: KeyedPrompt) -> VLLMRequest:
    """Return a request that is never scheduled: it names blocks by the hashes that a real one would have."""
    return VLLMRequest(
        request_id=request_id,
        prompt_token_ids=[*prompt.tokens, FILLER_TOKEN],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=prompt.salt,
        lora_request=None if prompt.adapter is None else to_lora_request(prompt.adapter),
        mm_features=to_specs(prompt.features, len(prompt.tokens)),
        block_hasher=core.request_block_hasher,
    )


def _publish_now(core: EngineCore) -> None:
    """Publish changes of blocks since the last step: an idle engine takes no steps, but received KV has arrived."""
    # vLLM publishes at the end of a step only; a router that does not learn of the blocks would compute them again.
    scheduler = _scheduler(core)
    events: Any = scheduler.kv_cache_manager.take_events()
    if events:
        scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))


# ---- calls of the methods ----------------------------------------------------------------------------------------


def add_core_methods() -> None:
    """Add the methods to ``EngineCore``. Relies on vLLM looking utility calls up by name on the instance."""
    for method in METHODS:
        setattr(EngineCore, name_of(method), answering(method))


def name_of(method: Callable[..., Any]) -> str:
    """Return a method's name on ``EngineCore``."""
    return f"tercet_{method.__name__}"


def answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method for vLLM: decode structs, and return ``[result, None]`` or ``[None, error]``."""
    # vLLM decodes a call's arguments without knowing their types: structs arrive as plain values.
    _, *types = _types_of(method).values()
    kinds = [
        kind if any(isinstance(each, type) and issubclass(each, msgspec.Struct) for each in (kind, *get_args(kind)))
        else None
        for kind in types
    ]  # fmt: skip

    def answer_of(get: Callable[[], Any]) -> list[Any]:
        try:
            return [get(), None]
        except TercetError as error:
            return [None, error.to_wire()]

    @wraps(method)
    def answer(core: EngineCore, *given: Any) -> Any:
        pairs = zip(given, kinds, strict=False)
        args = [arg if kind is None else msgspec.convert(arg, kind) for arg, kind in pairs]
        found = answer_of(lambda: method(core, *args))
        # A wait must not hold up the core's thread, which takes the steps that end it: vLLM answers when it is done.
        if not isinstance(found[0], Future):
            return found
        later: Future[list[Any]] = Future()
        found[0].add_done_callback(lambda done: later.set_result(answer_of(done.result)))
        return later

    return answer


class CoreCalls:
    """Calls of the methods above: the verbs' :class:`~tercet.engine.interface.SchedulerHalf`."""

    def __init__(self, client: AsyncLLM) -> None:
        self._client = client

    async def reserve(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        return await self.call(reserve, lease, prompt)

    async def give_up(self, lease: str) -> None:
        await self.call(give_up, lease)

    async def extend(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        return await self.call(extend, lease, prompt)

    async def commit(self, lease: str, valid: Content) -> None:
        await self.call(commit, lease, valid)

    async def release(self, lease: str, valid_end: int) -> int:
        return await self.call(release, lease, valid_end)

    async def push_cached(self, prompt: KeyedPrompt, send: SendPlan) -> list[Push] | None:
        return await self.call(push_cached, prompt, send)

    async def push_longest(self, prompt: KeyedPrompt, send: SendPlan) -> PinnedPrefix:
        return await self.call(push_longest, prompt, send)

    async def end_send(self, send_id: str) -> None:
        await self.call(end_send, send_id)

    async def sequences(self) -> list[RequestInCore]:
        return await self.call(sequences)

    async def call(self, method: Callable[[EngineCore, *Args], T | Future[T]], *args: *Args) -> T:
        """Call ``method`` on the core's thread; return its result, or raise its error."""
        result, error = await self._client.engine_core.call_utility_async(name_of(method), *args)
        if error is not None:
            raise from_wire(500, error)
        return msgspec.convert(result, _types_of(method)["return"])


@cache
def _types_of(method: Callable[..., Any]) -> dict[str, Any]:
    types = get_type_hints(method)
    returned = types["return"]
    return {**types, "return": get_args(returned)[0] if get_origin(returned) is Future else returned}


LONGEST_REQUEST = 1024
"""Bytes of the longest message: a request is a number of 8 bytes, a subscription is a topic."""


class _Bounding:
    """A ZeroMQ context whose sockets accept short messages only."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def socket(self, kind: int) -> Any:
        return bounded(self._context.socket(kind), LONGEST_REQUEST)


def bound_replay_requests() -> None:
    """Make publishers of KV events in this process refuse long messages: requests have a few bytes.

    vLLM's replay port accepts messages of any size from every process that reaches it, and writes invalid ones into the
    log in full. Relies on ``ZmqEventPublisher`` making its sockets by ``self._ctx.socket`` in its ``_socket_setup``.
    """

    def set_up(original: Method, publisher: Any, *args: Any) -> Any:
        context = publisher._ctx
        publisher._ctx = _Bounding(context)
        try:
            return original(publisher, *args)
        finally:
            publisher._ctx = context

    wrap(ZmqEventPublisher, "_socket_setup", set_up)
