"""Log probabilities of a choice, as its chunks have them: written from an engine's own numbers.

vLLM makes arrays, then a ``Logprob`` per token, then an object per token of the answer. Here a token's text, as JSON,
is looked up, and its number is put next to it. A token that is a part of a character has its text from vLLM, since it
depends on the tokens before.

Relies on ``LogprobsProcessor`` keeping one dict per position in ``logprobs``, the sampled token first, of which
``_get_sampled_context_ids`` reads the ids only, and on ``num_logprobs`` and ``_verify_tokens``; on
``append_logprobs_for_next_position`` taking the sampled token, then those of the ranks from 1 up to ``num_logprobs``;
and on ``_create_chat_logprobs`` and ``_create_completion_logprobs`` for what the client gets of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from tercet.protocol import Output, TokenLogprob
from tercet.vllm_plugin.fast_path.sse_chunks import encode
from tercet.vllm_plugin.fast_path.stream_plan import Logprobs

if TYPE_CHECKING:
    from vllm.v1.engine.logprobs import LogprobsProcessor

# vLLM's value for what is less likely, or impossible.
LEAST = -9999.0
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token's text, and its parts of a chat answer's JSON around the log probability."""

    text: str
    before: bytes
    after: bytes


def piece_of(text: str) -> Piece:
    """The piece of a text."""
    return Piece(text, b'{"token":%b,"logprob":' % encode(text), b',"bytes":%b' % encode([*text.encode()]))


class TokenPieces(dict[int, Piece | None]):
    """The piece of each token that has one by itself, filled on demand; None for parts of characters."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> Piece | None:
        text = convert_ids_list_to_tokens(self._tokenizer, [token_id])[0]
        found = self[token_id] = None if text.endswith(REPLACEMENT) else piece_of(text)
        return found


class LogprobChunks:
    """Log probabilities of one choice, of which ``processor`` is vLLM's record."""

    def __init__(
        self, asked: Logprobs, processor: LogprobsProcessor, serving: Any, pieces: TokenPieces | None, tokenizer: Any,
        *, is_chat: bool,
    ) -> None:  # fmt: skip
        self._asked = asked
        self._processor = processor
        self._serving = serving
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        # How many are told of each token; None: all.
        self._most = None if asked.top == -1 else asked.top or 0
        self._offset = 0

    @property
    def is_direct(self) -> bool:
        """Whether :meth:`of_output` can write them; vLLM's serving object can in any case."""
        is_list = type(self._processor.logprobs) is list
        return (
            self._pieces is not None and is_list and not self._asked.in_words and self._processor.tokenizer is not None
        )

    # ---- in vLLM's words -------------------------------------------------------------------------------------

    def of_result(self, completion: Any) -> bytes:
        """Those of one result of vLLM's output processor. Raises what vLLM does."""
        make = self._chat_in_words if self._is_chat else self._completion_in_words
        return make(completion.token_ids, completion.logprobs)

    def _chat_in_words(self, token_ids: Sequence[int], logprobs: Any) -> bytes:
        if logprobs is None:
            raise AssertionError("Did not output logprobs")  # vLLM's words
        made = self._serving._create_chat_logprobs(
            token_ids=token_ids, top_logprobs=logprobs, tokenizer=self._tokenizer,
            num_output_top_logprobs=self._asked.top, logprob_token_ids=self._asked.token_ids,
            return_as_token_id=self._asked.as_token_ids,
        )  # fmt: skip
        return made.model_dump_json(exclude_unset=True).encode()

    def _completion_in_words(self, token_ids: Sequence[int], logprobs: Any) -> bytes:
        if logprobs is None:
            raise AssertionError("Did not output logprobs")
        made = self._serving._create_completion_logprobs(
            token_ids=token_ids, top_logprobs=logprobs, tokenizer=self._tokenizer,
            num_output_top_logprobs=self._asked.top, logprob_token_ids=self._asked.token_ids,
            initial_text_offset=self._offset, return_as_token_id=self._asked.as_token_ids,
        )  # fmt: skip
        if made.tokens:
            self._offset = made.text_offset[-1] + len(made.tokens[-1])
        return made.model_dump_json(exclude_unset=True).encode()

    # ---- from an engine's numbers ----------------------------------------------------------------------------

    def takes(self, output: Output) -> bool:
        """Whether each token of an output has its own log probability, as engines send them."""
        found, tokens = output.logprobs, output.token_ids
        if found is None or len(found) != len(tokens):
            return False
        for position, token in zip(found, tokens, strict=True):
            if not position or position[0].token_id != token:
                return False
        return True

    def of_output(self, output: Output) -> bytes:
        """Those of an output that :meth:`takes` accepts."""
        positions = output.logprobs or ()
        if self._is_chat:
            return b'{"content":[%b]}' % b",".join(map(self._chat_json, positions))
        return self._completion_json(positions)

    def _position(self, position: Sequence[TokenLogprob]) -> tuple[list[Piece], list[float]]:
        """Pieces and values: the sampled token's, then the others' by rank, as vLLM's record would have them."""
        pieces: Any = self._pieces
        context: Any = self._processor.logprobs
        found = values_by_token(position, self._processor.num_logprobs)
        texts = [pieces[token] or self._part(token) for token in found]
        context.append({position[0].token_id: None})  # for the tokens after it
        rounded = array("f", found.values())  # engines' numbers have this precision, and vLLM's record too
        return texts, [LEAST if value < LEAST else value for value in rounded]

    def _part(self, token_id: int) -> Piece:
        return piece_of(self._processor._verify_tokens([REPLACEMENT], [token_id])[0])

    def _chat_json(self, position: Sequence[TokenLogprob]) -> bytes:
        pieces, values = self._position(position)
        entries = [
            b"%b%b%b" % (piece.before, encode(value), piece.after) for piece, value in zip(pieces, values, strict=True)
        ]
        others = b"},".join(entries if self._most is None else entries[: self._most])
        return b'%b,"top_logprobs":[%b%b]}' % (entries[0], others, b"}" if others else b"")

    def _completion_json(self, positions: Sequence[Sequence[TokenLogprob]]) -> bytes:
        offsets, tokens, values = list[int](), list[str](), list[float]()
        top = list[dict[str, float]]()
        most = None if self._most is None else self._most + 1
        for position in positions:
            pieces, each = self._position(position)
            text = pieces[0].text
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(text)
            values.append(each[0])
            top.append({piece.text: value for piece, value in zip(pieces[:most], each, strict=False)})
        return encode({"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": top})


def values_by_token(position: Sequence[TokenLogprob], most: int | None) -> dict[int, float]:
    """The value of the sampled token, then those of the ranks up to ``most`` (all for None and below 0) in order."""
    values = {position[0].token_id: position[0].logprob}
    last = 0
    for found in position[1:]:
        rank = found.rank or 0
        if rank <= last:
            return _sorted_by_token(position, most)
        last = rank
        if most is None or most < 0 or rank <= most:
            values[found.token_id] = found.logprob
    return values


def _sorted_by_token(position: Sequence[TokenLogprob], most: int | None) -> dict[int, float]:
    """The same for ranks in any order."""
    sampled, by_rank = position[0], {found.rank or 0: found for found in position}
    values = {sampled.token_id: sampled.logprob}
    depth = max((found.rank or 0 for found in position[1:]), default=0)
    depth = max(depth, sampled.rank or 0) if (sampled.rank or 0) <= len(position) else depth
    for rank in range(1, (depth if most is None or most < 0 else min(depth, most)) + 1):
        found = by_rank.get(rank, sampled)
        values[found.token_id] = found.logprob
    return values
