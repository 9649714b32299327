"""Methods that the general plugin adds to vLLM's ``EngineCore``, for the HTTP edge to call.

vLLM runs a utility call on the core's thread, between two engine steps. Expected failures come back as values, since
vLLM would log an exception as a fault of the engine. Every method returns ``[result, None]`` or ``[None, [code,
message, param]]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import msgspec

from tercet.protocol import Content, EngineError, TercetError
from tercet.vllm_plugin.connector import TercetConnector
from tercet.vllm_plugin.engine.connector_messages import ReservedBlocks, SendParams
from tercet.vllm_plugin.engine.reservations import FILLER_TOKEN
from tercet.vllm_plugin.engine.scheduler_side import SchedulerSide

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request as VLLMRequest


P = ParamSpec("P")


def _answers(method: Callable[P, Any]) -> Callable[P, Any]:
    @wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> Any:
        found = _found(lambda: method(*args, **kwargs))
        if not isinstance(found[0], Future):
            return found
        # vLLM answers the call when the future is done.
        later: Future[list[Any]] = Future()
        found[0].add_done_callback(lambda done: later.set_result(_found(lambda: msgspec.to_builtins(done.result()))))
        return later

    return answer


def _found(get: Callable[[], Any]) -> list[Any]:
    try:
        return [get(), None]
    except TercetError as error:
        return [None, [error.code, error.message, error.param]]


def _scheduler(core: EngineCore) -> Scheduler:
    from vllm.v1.core.sched.scheduler import Scheduler

    if not isinstance(core.scheduler, Scheduler):
        raise EngineError(f"the scheduler {type(core.scheduler).__name__} is not vLLM's own; Tercet needs that one")
    return core.scheduler


def _connector(core: EngineCore) -> TercetConnector:
    connector = core.scheduler.get_kv_connector()
    if not isinstance(connector, TercetConnector):
        raise EngineError("this engine runs without TercetConnector: start it with the documented --kv-transfer-config")
    return connector


def _side(core: EngineCore) -> SchedulerSide:
    return _connector(core).attach(_scheduler(core))


@_answers
def tercet_describe(core: EngineCore) -> dict[str, Any]:
    """Attach to the scheduler; say what the edge must know about this engine."""
    connector = _connector(core)
    connector.attach(_scheduler(core))
    return {
        "transports": connector.transports,
        "agents": connector.control_endpoints,
        "workers": connector.life_endpoints,
        "layout": msgspec.to_builtins(connector.layout),
        "token": connector.token,
        "lease_ttl": connector.settings.lease_ttl,
        "reserve_wait": connector.settings.reserve_wait,
        "kv_events": _published_at(_scheduler(core)),
    }


@_answers
def tercet_reserve(core: EngineCore, lease: str, tokens: list[int], cache_salt: str | None) -> Future[ReservedBlocks]:
    """Reserve blocks for ``tokens`` in their turn; ``ReservedBlocks``, when there is room."""
    owner = _probe(core, f"tercet-lease-{lease}", tokens, cache_salt)
    return _side(core).queue.reserve(lease, owner, len(tokens))


@_answers
def tercet_extend(core: EngineCore, lease: str, tokens: list[int], cache_salt: str | None) -> Any:
    """Reserve more blocks for an open lease, for more ``tokens`` of its sequence; ``ReservedBlocks``, of all."""
    owner = _probe(core, f"tercet-lease-{lease}", tokens, cache_salt)
    return msgspec.to_builtins(_side(core).queue.extend(lease, owner, len(tokens)))


@_answers
def tercet_give_up(core: EngineCore, lease: str) -> None:
    """End the wait of a reservation that has not got its blocks yet."""
    _side(core).queue.give_up(lease)


@_answers
def tercet_commit(core: EngineCore, lease: str, valid_end: int, digest: bytes) -> None:
    """Make received KV findable in the prefix cache."""
    _side(core).reservations.commit(lease, Content(valid_end, digest))
    _publish_now(_scheduler(core))


@_answers
def tercet_release(core: EngineCore, lease: str, valid_end: int) -> int:
    """Give the blocks of a lease back under which nobody writes any more; returns how far its KV was valid."""
    side = _side(core)
    side.queue.give_up(lease)
    valid_end = side.reservations.release(lease, valid_end)
    side.queue.admit()
    _publish_now(_scheduler(core))
    return valid_end


@_answers
def tercet_push_cached(core: EngineCore, tokens: list[int], cache_salt: str | None, send: dict[str, Any]) -> Any:
    """Pin KV that is cached in full; the ``Push`` of it, or nothing."""
    params = msgspec.convert(send, SendParams)
    probe = _probe(core, f"tercet-probe-{params.send_id}", tokens, cache_salt)
    push = _side(core).sends.push_cached(probe, params)
    return None if push is None else msgspec.to_builtins(push)


@_answers
def tercet_end_send(core: EngineCore, send_id: str) -> None:
    """Stop a send, whose blocks no agent reads any more, and unpin them."""
    side = _side(core)
    side.sends.end(send_id)
    side.queue.admit()


@_answers
def tercet_status(core: EngineCore) -> dict[str, Any]:
    """Load and holdings of this engine."""
    side = _side(core)
    pool = _scheduler(core).kv_cache_manager.block_pool
    running, waiting = core.scheduler.get_request_counts()
    return {
        "total_blocks": pool.num_gpu_blocks - 1,
        "free_blocks": pool.get_num_free_blocks(),
        "running": running,
        "waiting": waiting,
        "kv_cache_usage": pool.get_usage(),
        "leases": len(side.reservations),
        "sends": len(side.sends),
    }


def _probe(core: EngineCore, request_id: str, tokens: list[int], cache_salt: str | None) -> VLLMRequest:
    """A request that is never scheduled: it names blocks by the hashes that a real one would have."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request as VLLMRequest

    return VLLMRequest(
        request_id=request_id,
        prompt_token_ids=[*tokens, FILLER_TOKEN],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=core.request_block_hasher,
    )


def _published_at(scheduler: Scheduler) -> dict[str, Any] | None:
    """Endpoint, replay endpoint and topic of the engine's KV events; None if it publishes none."""
    import zmq
    from vllm.distributed.kv_events import ZmqEventPublisher

    publisher = scheduler.kv_event_publisher
    if not isinstance(publisher, ZmqEventPublisher) or publisher._pub is None:
        return None
    replay = publisher._replay
    return {
        "endpoint": publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT),
        "replay": None if replay is None else replay.getsockopt_string(zmq.LAST_ENDPOINT),
        "topic": publisher.get_publisher_config().topic,
    }


def _publish_now(scheduler: Scheduler) -> None:
    """Publish what happened to blocks since the last step: an idle engine makes none, and received KV has arrived."""
    from vllm.distributed.kv_events import KVEventBatch

    events: Any = scheduler.kv_cache_manager.take_events()
    if events:
        scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))


METHODS: tuple[Callable[..., Any], ...] = (
    tercet_describe,
    tercet_reserve,
    tercet_extend,
    tercet_give_up,
    tercet_commit,
    tercet_release,
    tercet_push_cached,
    tercet_end_send,
    tercet_status,
)


def add_core_methods() -> None:
    """Add the methods to ``EngineCore``; relies on utility calls being looked up by name on the instance."""
    from vllm.v1.engine.core import EngineCore

    for method in METHODS:
        setattr(EngineCore, method.__name__, method)
