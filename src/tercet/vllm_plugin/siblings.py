"""Tercet's connector and its siblings as one connector: vLLM's MultiConnector, with the order that Tercet needs.

A request is loaded by the first sibling that has more of its prompt than the prefix cache, and saved by all, as with
vLLM's own. What differs, for each engine::

    start    Tercet registers KV first: on CPUs it exchanges the memory's pages, and others may pin what they find
    start    each connector gets its own handshakes from all workers, and only those
    step     siblings plan first, and Tercet last: then the blocks that they read are known (:mod:`.core.sibling_waits`)
    step     Tercet sees which loads failed before it sends what they loaded (:class:`.core.scheduler_side.SendPlanner`)
    request  it is computed if siblings do not say in time what they have of its prompt
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole

from tercet.vllm_plugin.connector import TercetConnector
from tercet.vllm_plugin.hooks import UnsupportedVLLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
LONGEST_LOOKUP = 5.0
"""Seconds until a request is computed that siblings are still looking up.

That may last for ever: while a disk hangs, or if requests want more from vLLM's tier of files than its host memory has
room for. Each of their blocks then replaces another one, before any request has all that it wants.
"""


@dataclass
class SiblingHandshakes(KVConnectorHandshakeMetadata):
    """One worker's handshakes, by connector; None for one that has none."""

    of: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiConnector(multi_connector.MultiConnector):
    """Tercet's connector, the first one, with its siblings. vLLM finds it by the name of that class."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        tercet, *siblings = self._connectors
        if not isinstance(tercet, TercetConnector):
            raise UnsupportedVLLM(f"the first of the connectors must be TercetConnector, is {type(tercet).__name__}")
        self.tercet = tercet
        tercet.siblings = tuple(siblings)
        self._looked_up_since: WeakKeyDictionary[Request, float] = WeakKeyDictionary()

    def get_handshake_metadata(self) -> SiblingHandshakes:
        return SiblingHandshakes(tuple(each.get_handshake_metadata() for each in self._connectors))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for at, connector in enumerate(self._connectors):
            workers = {rank: each.of[at] for rank, each in metadata.items() if isinstance(each, SiblingHandshakes)}
            found = {rank: each for rank, each in workers.items() if each is not None}
            if found:
                connector.set_xfer_handshake_metadata_pp_aware(found)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is not None:
            self._looked_up_since.pop(request, None)
            return found
        if self.tercet.get_num_new_matched_tokens(request, num_computed_tokens)[0] is None:
            return found  # it waits for its turn, and vLLM has not asked the siblings
        now = time.monotonic()
        since = self._looked_up_since.setdefault(request, now)
        if now - since < LONGEST_LOOKUP:
            return found
        if since > -math.inf:
            seconds, who = now - since, request.request_id
            logger.warning("%s is computed: other KV connectors have looked it up for %.1f s", who, seconds)
            self._looked_up_since[request] = -math.inf
        # One of them may have answered. All learn of the request's blocks, and that they have to load none.
        self._requests_to_connector.pop(request.request_id, None)
        return 0, False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> multi_connector.MultiKVConnectorMetadata:
        siblings = [each.build_connector_meta(scheduler_output) for each in self.tercet.siblings]
        planned = (self.tercet.build_connector_meta(scheduler_output), *siblings)
        saves, self._extra_async_saves = self._extra_async_saves, {}
        return multi_connector.MultiKVConnectorMetadata(planned, saves or None)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the siblings' events, and record at once that a step has ended: vLLM's own waits for a reader."""
        events = [event for each in self.tercet.siblings for event in each.take_events()]
        if (waits := self.tercet.sibling_waits) is not None:
            waits.tiers.note(events)
        return [*events, *self.tercet.take_events()]

    def get_finished_count(self) -> int | None:
        """Return an only sibling's count; Tercet's has none."""
        siblings = self.tercet.siblings
        return siblings[0].get_finished_count() if len(siblings) == 1 else super().get_finished_count()

    def reset_cache(self) -> bool:
        """Reset the siblings' caches, but not what Tercet knows to be in flight: see :mod:`.core.sibling_waits`."""
        if (waits := self.tercet.sibling_waits) is not None:
            waits.siblings_reset()
        return super().reset_cache()
