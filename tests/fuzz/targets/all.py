"""Every target, by layer."""

from __future__ import annotations

from tests.fuzz.targets import agents, endpoint_picker, kv_transfer, router, token_streams, verbs

TARGETS = (
    *kv_transfer.TARGETS,
    *token_streams.TARGETS,
    *agents.TARGETS,
    *router.TARGETS,
    *verbs.TARGETS,
    *endpoint_picker.TARGETS,
)
