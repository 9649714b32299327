"""A reader of calls: the prompt's tokens, adapter and images, checked against this engine's model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tercet.protocol.wire import PrepRecvCall, Prompt, RemoteSendCall, StartGenerateCall
from tercet.vllm_plugin.core.keyed_prompt import KeyedPrompt
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.call_checks import limits_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Call = PrepRecvCall | RemoteSendCall | StartGenerateCall


class CallReader:
    """A reader of calls for the engine behind ``client``.

    Raises :class:`~tercet.protocol.BadRequest` for invalid calls.
    """

    def __init__(self, client: AsyncLLM, adapters: Adapters) -> None:
        self._client = client
        self._adapters = adapters
        self.limits = limits_of(client)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, which may be text; text is tokenized in a thread, since it may be long."""
        if isinstance(prompt, str):
            tokens: list[int] = await asyncio.to_thread(self._client.get_tokenizer().encode, prompt)
        else:
            tokens = list(prompt)
        self.limits.check_prompt(tokens)
        return tokens

    async def keyed(self, call: Call, tokens: list[int]) -> KeyedPrompt:
        """Return a call's prompt, with these :meth:`tokens` and all other inputs of its KV.

        Raises :class:`~tercet.protocol.UnknownAdapter`, also for an adapter with other contents here, and
        :class:`~tercet.protocol.Conflict` if its files have changed.
        """
        adapter = await self._adapters.find(call.adapter, call.adapter_digest)
        self.limits.check_features(tokens, call.mm_features, call.adapter)
        features = tuple(feature.without_data() for feature in call.mm_features)
        return KeyedPrompt(tokens, call.cache_salt, adapter, features)

    def model_of(self, call: Call) -> str:
        """Return the name of the LoRA adapter of a call, or of the model."""
        return call.adapter or self.served_name

    @property
    def served_name(self) -> str:
        """The model's name in vLLM's API."""
        return str(self._client.vllm_config.model_config.served_model_name)
