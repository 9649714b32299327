"""vLLM's KV events: where they are published, and those that no step publishes.

Relies on ``scheduler.kv_event_publisher`` being vLLM's ZeroMQ publisher with its sockets in ``_pub`` and ``_replay``,
which say at which port they are when the system chose it; and on ``kv_cache_manager.take_events`` handing over what
has happened since the last step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def published_at(scheduler: Scheduler) -> dict[str, Any] | None:
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


def publish_now(scheduler: Scheduler) -> None:
    """Publish what happened to blocks since the last step: an idle engine makes none, and received KV has arrived."""
    from vllm.distributed.kv_events import KVEventBatch

    events: Any = scheduler.kv_cache_manager.take_events()
    if events:
        scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
