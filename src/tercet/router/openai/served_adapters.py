"""The adapters of a fleet, for vLLM's OpenAI layer, which looks them up by the client's model name.

Relies on ``OpenAIServingModels.lora_requests`` being the only source of adapters in this layer, which reads it as a
mapping for each request and for ``/v1/models``; and on ``InputProcessor`` refusing an adapter only if its
``lora_config`` is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from tercet.protocol import AdapterReport

# vLLM needs a number. A router loads no adapter: it sends the name to the engines, which number their adapters.
NUMBER = 1


class ServedAdapters(Mapping[str, LoRARequest]):
    """Live view of the adapters that ``known`` returns."""

    def __init__(self, known: Callable[[], Mapping[str, AdapterReport]]) -> None:
        self._known = known

    def __getitem__(self, name: str) -> LoRARequest:
        return LoRARequest(name, NUMBER, self._known()[name].path)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._known()))

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, name: object) -> bool:
        return name in self._known()


def serve_adapters(state: Any, engine_client: Any, known: Callable[[], Mapping[str, AdapterReport]]) -> None:
    """Make vLLM's layer, whose application has this ``state``, serve the adapters that ``known`` returns."""
    state.openai_serving_models.lora_requests = ServedAdapters(known)
    engine_client.input_processor.lora_config = LoRAConfig()
