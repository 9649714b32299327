"""Texts of single tokens, looked up instead of decoded; and the JSON of log probabilities, which has such texts.

With a byte-level vocabulary, the text of a sequence is the bytes of its tokens, one after the other. A token whose
bytes are whole characters has the same text everywhere, unless the token before it left a character unfinished.
vLLM's detokenizer decodes all other tokens, and every token of other vocabularies.

For log probabilities, vLLM makes arrays, then a ``Logprob`` per token, then an object per token of the answer. This
module looks up the JSON of a token's text and adds the number. If a token is a part of a character, vLLM makes its
text, which depends on the tokens before it.

Relies on ``FastIncrementalDetokenizer`` calling its own ``decode_next`` for the text of each token; on its stream
keeping back only an unfinished character, so that it can skip whole tokens; and on the ``ByteLevel`` decoder of
``tokenizers`` converting tokens to bytes one by one. Also on ``LogprobsProcessor`` keeping one dict per position in
``logprobs``, with the sampled token first, and on ``_get_sampled_context_ids`` reading only the ids in it; on
``num_logprobs`` and ``_verify_tokens``; on ``append_logprobs_for_next_position`` taking the sampled token, then the
tokens of rank 1 to ``num_logprobs``; and on ``_create_chat_logprobs`` and ``_create_completion_logprobs`` making the
client's format.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import ByteLevel
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from tercet.protocol import Output, TokenLogprob
from tercet.router.openai.fast_path.sse_chunks import encode

if TYPE_CHECKING:
    from vllm.v1.engine.logprobs import LogprobsProcessor

# vLLM's lower bound for a log probability in an answer.
LEAST = -9999.0
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts(dict[int, str]):
    """The text of each token, filled on demand; empty for special tokens, parts of characters and unknown ids.

    ``backend`` is a ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> str:
        try:
            text = self._backend.decode([token_id], skip_special_tokens=True)
        except OverflowError:  # not a valid id
            return ""
        whole = self[token_id] = "" if REPLACEMENT in text else text
        return whole


def texts_of(tokenizer: Any) -> TokenTexts | None:
    """Return the texts of the tokens of vLLM's ``tokenizer``; None if a token's text depends on its neighbours."""
    backend = getattr(tokenizer, "_tokenizer", None)
    return TokenTexts(backend) if isinstance(getattr(backend, "decoder", None), ByteLevel) else None


def look_up(detokenizer: Any, texts: TokenTexts | None, prompt: Sequence[int]) -> Callable[[int], str] | None:
    """Make ``detokenizer`` look up texts; ``prompt`` has the tokens before its first one.

    Returns the function for the text of its next token. Returns None, and changes nothing, if look-up is impossible:
    for other detokenizers, and for texts with special tokens but without spaces between them.
    """
    if texts is None or type(detokenizer) is not FastIncrementalDetokenizer:
        return None
    if not detokenizer.spaces_between_special_tokens:
        return None
    # `whole`: the token before left no character unfinished. Without that, a text by itself may be a wrong one.
    decode, whole = detokenizer.decode_next, not prompt or bool(texts[prompt[-1]])

    def decode_next(next_token_id: int) -> str:
        nonlocal whole
        text = texts[next_token_id]
        if text and whole:
            return text
        whole = bool(text)  # after a token with text, no character is unfinished
        return decode(next_token_id)

    detokenizer.decode_next = decode_next
    return decode_next


# ---- log probabilities -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities that a request asks for."""

    #: How many of each token; -1: all, None: none of them.
    top: int | None
    token_ids: list[int] | None
    as_token_ids: bool | None
    #: The answer needs more than each token's text and value, so vLLM's serving object makes it.
    by_vllm: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """One token's text, and the JSON of a chat answer ``before`` and ``after`` its log probability."""

    text: str
    before: bytes
    after: bytes


def piece_of(text: str) -> Piece:
    """Return the piece for ``text``."""
    return Piece(text, b'{"token":%b,"logprob":' % encode(text), b',"bytes":%b' % encode([*text.encode()]))


class TokenPieces(dict[int, Piece | None]):
    """The piece of each token whose text needs no other token, filled on demand; None for parts of characters."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> Piece | None:
        text = convert_ids_list_to_tokens(self._tokenizer, [token_id])[0]
        piece = self[token_id] = None if text.endswith(REPLACEMENT) else piece_of(text)
        return piece


class LogprobChunks:
    """Log probabilities of one choice; ``processor`` is vLLM's record of them."""

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
        # The number of top log probabilities per token in the answer; None: all.
        self._most = None if asked.top == -1 else asked.top or 0
        self._offset = 0

    @property
    def is_direct(self) -> bool:
        """True if :meth:`of_output` can write the log probabilities; otherwise vLLM's serving object makes them."""
        record = self._processor
        is_written_here = self._pieces is not None and not self._asked.by_vllm
        return is_written_here and type(record.logprobs) is list and record.tokenizer is not None

    def of_result(self, completion: Any) -> bytes:
        """Return the JSON that vLLM makes for one result of its output processor. Raises vLLM's exceptions."""
        if completion.logprobs is None:
            raise AssertionError("Did not output logprobs")  # the same message as vLLM's
        given: dict[str, Any] = {
            "token_ids": completion.token_ids, "top_logprobs": completion.logprobs, "tokenizer": self._tokenizer,
            "num_output_top_logprobs": self._asked.top, "logprob_token_ids": self._asked.token_ids,
            "return_as_token_id": self._asked.as_token_ids,
        }  # fmt: skip
        if self._is_chat:
            made = self._serving._create_chat_logprobs(**given)
        else:
            made = self._serving._create_completion_logprobs(**given, initial_text_offset=self._offset)
            if made.tokens:
                self._offset = made.text_offset[-1] + len(made.tokens[-1])
        return made.model_dump_json(exclude_unset=True).encode()

    def takes(self, output: Output) -> bool:
        """True if the output has the log probability of each of its tokens, as engines send it."""
        if output.logprobs is None:
            return False
        return [position[0].token_id if position else None for position in output.logprobs] == [*output.token_ids]

    def of_output(self, output: Output) -> bytes:
        positions = output.logprobs or ()
        pieces: Any = self._pieces
        if self._is_chat:
            content: list[bytes] = []
            for position in positions:
                tokens, values = self._values(position)
                numbers = encode(values)[1:-1].split(b",")  # one call for all numbers is faster than one for each
                found = [pieces[token] or self._part(token) for token in tokens]
                entries = [piece.before + number + piece.after for piece, number in zip(found, numbers, strict=True)]
                self._record(position)
                others = b"},".join(entries if self._most is None else entries[: self._most])
                content.append(b'%b,"top_logprobs":[%b%b]}' % (entries[0], others, b"}" if others else b""))
            return b'{"content":[%b]}' % b",".join(content)
        offsets, sampled, own = list[int](), list[str](), list[float]()
        top = list[dict[str, float]]()
        most = None if self._most is None else self._most + 1
        for position in positions:
            tokens, values = self._values(position)
            texts = [(pieces[token] or self._part(token)).text for token in tokens]
            self._record(position)
            offsets.append(self._offset)
            self._offset += len(texts[0])
            sampled.append(texts[0])
            own.append(values[0])
            top.append(dict(zip(texts[:most], values, strict=False)))
        return encode({"text_offset": offsets, "token_logprobs": own, "tokens": sampled, "top_logprobs": top})

    def _values(self, position: Sequence[TokenLogprob]) -> tuple[Iterable[int], list[float]]:
        """Return tokens and their values: the sampled one, then the others by rank, in the order of vLLM's record."""
        values = values_by_token(position, self._processor.num_logprobs)
        # ``f`` is the precision of engines' numbers and vLLM's.
        return values, [LEAST if value < LEAST else value for value in array("f", values.values())]

    def _record(self, position: Sequence[TokenLogprob]) -> None:
        """Add the sampled token to vLLM's record, which it reads for the text of the tokens after this one."""
        context: Any = self._processor.logprobs
        context.append({position[0].token_id: None})

    def _part(self, token_id: int) -> Piece:
        return piece_of(self._processor._verify_tokens([REPLACEMENT], [token_id])[0])


def values_by_token(position: Sequence[TokenLogprob], most: int | None) -> dict[int, float]:
    """Return the value of the sampled token, then the values by rank up to rank ``most`` (None or below 0: all)."""
    values = {position[0].token_id: position[0].logprob}
    last = 0
    for token in position[1:]:
        rank = token.rank or 0
        if rank <= last:
            sampled, by_rank = position[0], {token.rank or 0: token for token in position}
            values = {sampled.token_id: sampled.logprob}
            depth = max((token.rank or 0 for token in position[1:]), default=0)
            depth = max(depth, sampled.rank or 0) if (sampled.rank or 0) <= len(position) else depth
            for rank in range(1, (depth if most is None or most < 0 else min(depth, most)) + 1):
                token = by_rank.get(rank, sampled)
                values[token.token_id] = token.logprob
            return values
        last = rank
        if most is None or most < 0 or rank <= most:
            values[token.token_id] = token.logprob
    return values
