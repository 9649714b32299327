"""The tokens of a prompt as its engine would make them: by the checkpoint's chat template and tokenizer.

The tokenizer caches segments of text, so that only the new part of a conversation costs time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import jinja2.sandbox
import msgspec
from jinja2.ext import loopcontrols
from tokenizers import Tokenizer

from tercet.protocol import BadRequest
from tercet.protocol.json_text import UNREADABLE
from tercet_gateway.openai_call import OpenAICall, Tokens, estimated, stand_ins, token_ids

SEGMENT = 2048
"""Number of characters that are tokenized, and cached, together."""
AT_ONCE = 2 * SEGMENT
"""Most new characters that are tokenized at once; a thread tokenizes more, while other requests are served."""
MOST_PENDING = 64 * SEGMENT
"""Most characters that may wait for the thread; beyond that, prompts are estimated."""
MOST_UNLEARNED = 2048 * SEGMENT
"""Most characters that wait to be tokenized later; the oldest are dropped first."""
LEARNED_TOGETHER = 2
PAUSE_SECONDS = 0.002
COSTS = 320
"""Bytes of a cached segment in addition to its text and its tokens: the objects that hold them."""
NICENESS = 10
Segment = tuple[str, bool]
"""A text, and whether special tokens are added."""


class SegmentTokenizer:
    """A tokenizer that handles about ``budget`` new characters of a text at once; the rest gets stand-ins for now.

    Segments use at most ``most_bytes`` bytes; the least recently used are dropped first.
    """

    def __init__(self, tokenizer: Tokenizer, budget: int, most_bytes: int) -> None:
        self.bytes = 0
        self._tokenizer = tokenizer
        self._budget = budget
        self._most_bytes = most_bytes
        self._seen: OrderedDict[Segment, Tokens] = OrderedDict()
        # One object for each token id, shared by all segments: a token takes 8 bytes in each of them.
        self._ids = list(range(tokenizer.get_vocab_size() + 1))
        self._pending = 0
        self._urgent = ThreadPoolExecutor(1, "tokens")
        self._patient = ThreadPoolExecutor(1, "later-tokens", initializer=_be_nice)  # requests that wait go first
        self._unlearned: deque[Segment] = deque(maxlen=MOST_UNLEARNED // SEGMENT)
        self._learning: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop tokenizing in the background."""
        if self._learning is not None:
            self._learning.cancel()
        self._urgent.shutdown(wait=False, cancel_futures=True)
        self._patient.shutdown(wait=False, cancel_futures=True)

    async def tokens(self, text: str, add_special_tokens: bool) -> Tokens:
        segments = list(_segments(text, add_special_tokens))
        known = [self._seen.get(segment) for segment in segments]
        for segment, tokens in zip(segments, known, strict=True):
            if tokens is not None:
                self._seen.move_to_end(segment)
        new = [segment for segment, tokens in zip(segments, known, strict=True) if tokens is None]
        if new:
            now = self._affordable(new)
            self._learn_later(new[len(now) :])
            made = dict(zip(now, await self._encoded(now), strict=True)) if now else {}
            known = [made.get(s) if tokens is None else tokens for s, tokens in zip(segments, known, strict=True)]
        return _joined(segments, known)

    def _affordable(self, new: Sequence[Segment]) -> Sequence[Segment]:
        left = self._budget
        for place, (text, _) in enumerate(new):
            if left <= 0:
                return new[:place]
            left -= len(text)
        return new

    # ---- tokenizing ------------------------------------------------------------------------------------------

    async def _encoded(self, segments: Sequence[Segment]) -> Sequence[Tokens | None]:
        """Return the tokens of the segments; None for segments for which there is no time now."""
        characters = sum(len(text) for text, _ in segments)
        if characters <= AT_ONCE:
            return self._remembered(segments, self._encode(segments))
        if self._pending and self._pending + characters > MOST_PENDING:
            self._learn_later(segments)
            return [None] * len(segments)
        self._pending += characters
        try:
            loop = asyncio.get_running_loop()
            return self._remembered(segments, await loop.run_in_executor(self._urgent, self._encode, segments))
        finally:
            self._pending -= characters

    def _encode(self, segments: Sequence[Segment]) -> list[list[int]]:
        # Even one text is encoded as a batch: only for batches does the tokenizer let other threads run.
        texts = [text for text, special in segments if not special]
        plain = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else ())
        return [
            (self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0] if special else next(plain)).ids
            for text, special in segments
        ]

    def _learn_later(self, segments: Sequence[Segment]) -> None:
        self._unlearned += segments
        if self._unlearned and (self._learning is None or self._learning.done()):
            self._learning = asyncio.create_task(self._learn(), name="learning segments")

    async def _learn(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unlearned:
            while self._pending:  # requests that wait go first # noqa: ASYNC110
                await asyncio.sleep(PAUSE_SECONDS)
            some = [self._unlearned.popleft() for _ in range(min(LEARNED_TOGETHER, len(self._unlearned)))]
            missing = [segment for segment in dict.fromkeys(some) if segment not in self._seen]
            if missing:
                try:
                    self._remembered(missing, await loop.run_in_executor(self._patient, self._encode, missing))
                except Exception:  # a tokenizer may raise any error; all waiting prompts get it, and are estimated
                    logger.exception("a part of a prompt cannot be tokenized")

    # ---- remembering -----------------------------------------------------------------------------------------

    def _remembered(self, segments: Sequence[Segment], encoded: Sequence[Sequence[int]]) -> Sequence[Tokens]:
        made = [self._shared(ids) for ids in encoded]
        for segment, tokens in zip(segments, made, strict=True):
            if segment not in self._seen:
                self._seen[segment] = tokens
                self.bytes += _size(segment, tokens)
        while self.bytes > self._most_bytes:
            self.bytes -= _size(*self._seen.popitem(last=False))
        return made

    def _shared(self, ids: Sequence[int]) -> Tokens:
        """Return the same numbers, as the shared objects."""
        if len(ids) < 2 or max(ids) >= len(self._ids):
            return tuple(ids)
        return itemgetter(*ids)(self._ids)


def _size(segment: Segment, tokens: Tokens) -> int:
    text = segment[0]
    return COSTS + len(text) * (1 if text.isascii() else 4) + 8 * len(tokens)


def _segments(text: str, add_special_tokens: bool) -> Iterator[Segment]:
    start, first = 0, add_special_tokens
    while start < len(text):
        end = _segment_end(text, start)
        yield text[start:end], first
        start, first = end, False


def _segment_end(text: str, start: int) -> int:
    """Return the end of a segment: before its last blank, where tokenizers cut anyway.

    It depends only on the text before it.
    """
    end = start + SEGMENT
    if end >= len(text):
        return len(text)
    blank = text.rfind(" ", start + SEGMENT // 2, end)
    return blank if blank > start else end


def _joined(segments: Sequence[Segment], known: Sequence[Tokens | None]) -> Tokens:
    """Return the tokens up to the first unknown segment, and stand-ins for the rest."""
    tokens: list[int] = []
    for place, found in enumerate(known):
        if found is None:
            rest = "".join(text for text, _ in segments[place:])
            return (*tokens, *stand_ins(rest.encode("utf-8", "surrogatepass")))
        tokens += found
    return tuple(tokens)


def _be_nice() -> None:
    """Lower the thread's priority: requests that wait go first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


logger = logging.getLogger("tercet.gateway")
MANY_MESSAGES = 64
"""Number of messages above which a thread fills in the template, while other requests are served."""
MOST_RENDERING = 8
"""Most prompts in that thread, including those that wait for it; further prompts are estimated."""
LONGEST_REASON = 300


class CannotRender(Exception):
    """An error for a call whose prompt has parts that cannot be rendered here."""


def tokenizer_file(directory: Path) -> Path:
    """Return a checkpoint's tokenizer file. Raises :class:`~tercet.protocol.BadRequest` if it does not exist."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise BadRequest(f"render-model: {directory} has no tokenizer.json", "render-model")
    return file


class ModelRenderer:
    """A renderer that uses the tokenizer and the chat template of a checkpoint in ``directory``.

    ``budget`` and ``most_bytes`` are as for :class:`SegmentTokenizer`. A prompt that cannot be rendered (pictures,
    failing templates and tokenizers) gets stand-ins as a whole. Raises :class:`~tercet.protocol.BadRequest` if the
    checkpoint's tokenizer or chat template cannot be read.
    """

    def __init__(self, directory: Path, budget: int = 8 * SEGMENT, most_bytes: int = 128 * 2**20) -> None:
        file = tokenizer_file(directory)
        try:
            tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other class
            raise BadRequest(f"render-model: {file} is not a tokenizer: {error}", "render-model") from error
        configured = directory / "tokenizer_config.json"
        try:
            content = configured.read_bytes() if configured.is_file() else b"{}"
            self._config = msgspec.json.decode(content, type=dict[str, Any])
        except (OSError, *UNREADABLE) as error:
            raise BadRequest(f"render-model: {configured} cannot be read: {error}", "render-model") from error
        self._template = _template_of(directory, self._config)
        self.segments = SegmentTokenizer(tokenizer, budget, most_bytes)
        self._rendering = 0
        self._logged: set[str] = set()

    def close(self) -> None:
        """Close the tokenizer; no more calls may follow."""
        self.segments.close()

    async def tokens(self, call: OpenAICall) -> Tokens:
        if call.opening or (call.body.messages is None and token_ids(call.body.prompt) is not None):
            return estimated(call)
        try:
            return await self.segments.tokens(*await self._text_of(call))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a template may raise any error, and a tokenizer's panics are not Exceptions
            why = (str(error) or type(error).__name__)[:LONGEST_REASON]
            if why not in self._logged and len(self._logged) < 100:
                self._logged.add(why)
                logger.warning("a prompt cannot be rendered, so its tokens are estimated from characters: %s", why)
            return estimated(call)

    async def _text_of(self, call: OpenAICall) -> tuple[str, bool]:
        """Return the result of :meth:`_written`, from a thread if it may take long."""
        many = call.body.messages if call.body.messages is not None else call.body.input
        if many is None or isinstance(many, str) or len(many) <= MANY_MESSAGES:
            return self._written(call)
        if self._rendering >= MOST_RENDERING:
            raise CannotRender("too many long conversations at once")
        self._rendering += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(None, self._written, call)
        finally:
            self._rendering -= 1

    def _written(self, call: OpenAICall) -> tuple[str, bool]:
        """Return the prompt as the engine's serving layer would write it, and whether special tokens are added."""
        body = call.body
        if body.messages is not None:
            return self._chat([_flat(message) for message in body.messages], call), False
        if body.input is not None:
            system = [{"role": "system", "content": body.instructions}] if body.instructions else []
            said = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
            return self._chat([*system, *(_flat(message) for message in said)], call), False
        if isinstance(body.prompt, str):
            return body.prompt, True
        raise CannotRender("a list of prompts")

    def _chat(self, messages: Sequence[Mapping[str, Any]], call: OpenAICall) -> str:
        if self._template is None:
            raise CannotRender("the checkpoint has no chat template")
        named = {name: _token(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        given = {**named, "add_generation_prompt": True, **(call.body.chat_template_kwargs or {})}
        return self._template.render(messages=messages, tools=call.body.tools or None, documents=None, **given)


def _flat(message: object) -> Mapping[str, Any]:
    """Return a message whose content is text, as chat templates need it."""
    if not isinstance(message, Mapping):
        raise CannotRender("a message that is not a mapping")
    fields = dict(cast("Mapping[str, Any]", message))
    content = fields.get("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):  # pyright: ignore[reportUnknownMemberType]
            raise CannotRender("content that is not text")
        fields["content"] = "\n".join(part["text"] for part in parts)
    return fields


def _token(declared: object) -> str:
    """Return a special token of a configuration, in which it is a string, or a mapping with its content."""
    if isinstance(declared, Mapping):
        declared = cast("Mapping[str, object]", declared).get("content")
    return declared if isinstance(declared, str) else ""


def _template_of(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    """Return the checkpoint's chat template, in the environment that such templates expect; None without one."""
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"render-model: {file} cannot be read: {error}", "render-model") from error
    if not isinstance(source, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    cast("dict[str, Any]", environment.globals).update(raise_exception=_complain, strftime_now=_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise BadRequest(f"render-model: the chat template of {directory}: {error}", "render-model") from error


def _as_json(value: object, indent: int | None = None) -> str:
    encoded = msgspec.json.encode(value)
    return msgspec.json.format(encoded, indent=indent or 0).decode()


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _complain(message: str) -> None:
    raise jinja2.TemplateError(message)
