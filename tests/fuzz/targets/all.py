"""Every target, by layer."""

from __future__ import annotations

from tests.fuzz.targets import agents, endpoint_picker, front_door, kv_transfer, token_streams, verbs

TARGETS = (
    *kv_transfer.TARGETS,
    *token_streams.TARGETS,
    *agents.TARGETS,
    *front_door.TARGETS,
    *verbs.TARGETS,
    *endpoint_picker.TARGETS,
)
