"""The context of a session: the tokens of one turn, prompt and answer, and the engine that has their KV."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.protocol import Request
from tercet.protocol.content import TOKEN_BYTES, packed, unpacked


class Context:
    """The tokens of a turn that has ended, four bytes each, and the ``engine`` whose cache has most of their KV.

    ``kept_at`` is the time at which its KV was pinned there, None if it is not pinned; ``to`` is the engine to which it
    is being moved, or None.
    """

    __slots__ = (
        "_adapter", "_cache_salt", "_digest", "_prompt_size", "_tokens", "engine", "kept_at", "number", "session", "to",
    )  # fmt: skip

    def __init__(self, number: int, session: str, engine: str, request: Request, output: Sequence[int]) -> None:
        self.number = number
        self.session = session
        self.engine = engine
        self.kept_at: float | None = None
        self.to: str | None = None
        self._prompt_size = request.num_tokens * TOKEN_BYTES
        # The last token's KV was never computed.
        self._tokens = packed(request.prompt) + packed(output[:-1])
        self._cache_salt, self._adapter, self._digest = request.cache_salt, request.adapter, request.adapter_digest

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV was computed."""
        return len(self._tokens) // TOKEN_BYTES

    def request(self, seq_id: str) -> Request:
        """Return a request for these tokens, for verbs that identify KV by its tokens."""
        return Request(
            seq_id=seq_id, prompt=tuple(unpacked(self._tokens)), cache_salt=self._cache_salt, adapter=self._adapter,
            adapter_digest=self._digest,
        )  # fmt: skip

    def shared_with(self, request: Request, prompt: bytes) -> int:
        """Return the number of the request's first tokens that this context has; ``prompt`` is packed.

        That is all of the context, or the turn's prompt, or 0. A chat template may write an answer in another way than
        the model did; then only the prompt is repeated.
        """
        if (request.cache_salt, request.adapter) != (self._cache_salt, self._adapter):
            return 0
        if prompt.startswith(self._tokens):
            return self.num_tokens
        return self._prompt_size // TOKEN_BYTES if prompt.startswith(self._tokens[: self._prompt_size]) else 0
