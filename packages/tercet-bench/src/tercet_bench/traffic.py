"""The sending of a plan's requests to the measured server, each when it is due or when a user is free.

Before that the server is asked what it is, and its model's tokenizer becomes the vocabulary of the workload; planned
conversations become requests that are ready to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import aiohttp
import msgspec

from tercet.aio.tasks import TaskSet
from tercet.protocol import BadRequest, EngineUnreachable
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.wire.client.bounded_answers import reason_of
from tercet_bench.bench_config import PromptAs
from tercet_bench.openai_client import COMPLETIONS, Client, PreparedCall, Reading, body_of
from tercet_lab.bench.workloads import Conversation, ConversationTurn, Vocabulary
from tercet_lab.tables import RequestRow

# A server on a busy machine takes long for its first answer.
ASK_SECONDS = 30.0
DEEPEST = 32
# Further information from Tercet's router and vLLM; other servers answer 404, which is accepted.
MORE = {"version": "/version", "engines": "/tercet/v1/engines", "program": "/tercet/v1/program"}
LISTED = ("root", "max_model_len")


@dataclass(frozen=True)
class BenchTarget:
    """A server that answers. ``root`` is the source of its model (None: not reported)."""

    base_url: str
    model: str
    root: str | None
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def tokenizer(self) -> str:
        """Probable place of the model's tokenizer: the checkpoint if this machine has it, else the model's name."""
        return self.root if self.root and Path(self.root).is_dir() else self.model


async def ask_target(base_url: str, model: str | None, headers: Mapping[str, str]) -> BenchTarget:
    """Query the server at ``base_url`` for its models and further information.

    ``model`` is the model to use (None: the first one listed). Raise :class:`~tercet.protocol.EngineUnreachable`
    without an answer, and :class:`~tercet.protocol.BadRequest` if the server does not serve the model.
    """
    url = base_url.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        try:
            listed = await _models(session, f"{url}/v1/models")
        except (aiohttp.ClientError, OSError, ValueError, *UNREADABLE) as error:
            reason = f"no answer within {ASK_SECONDS:.0f} s" if isinstance(error, TimeoutError) else reason_of(error)
            raise EngineUnreachable(f"{url} does not answer as an OpenAI server: {reason}", "base-url") from error
        names = [str(entry.get("id")) for entry in listed]
        if model is None and not names:
            raise BadRequest(f"model: {url} does not list any model; give --model", "model")
        if model is not None and names and model not in names:
            raise BadRequest(f"model: {url} does not serve {model}; it serves {', '.join(names)}", "model")
        chosen = model or names[0]
        entry = next((entry for entry in listed if entry.get("id") == chosen), dict[str, Any]())
        root = entry.get("root")
        about = {name: answer for name, path in MORE.items() if (answer := await _ask(session, url + path)) is not None}
    engines: list[Any] = about["engines"] if isinstance(about.get("engines"), list) else []
    versions = {str(cast("dict[str, Any]", each).get("vllm") or "") for each in engines if isinstance(each, dict)}
    about |= {"engine_versions": found} if (found := sorted(versions - {""})) else {}
    about |= {"base_url": url, "model": chosen}
    about |= {name: entry[name] for name in LISTED if name in entry}
    return BenchTarget(url, chosen, root if isinstance(root, str) else None, about)


async def require_programs(base_url: str, programs: Sequence[str], headers: Mapping[str, str]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for the first program that the router at ``base_url`` does not know.

    A router checks the program's name in the header of every request, also of requests without generation.
    """
    url = f"{base_url.rstrip('/')}/v1/models"
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for program in programs:
            try:
                async with session.get(url, headers={PROGRAM_HEADER: program}) as response:
                    body = await response.read() if response.status == 400 else None
                    refusal = None if body is None else msgspec.json.decode(body, type=_Refused).error.message
            except (aiohttp.ClientError, OSError, *UNREADABLE) as error:
                raise EngineUnreachable(f"cannot check program {program} at {url}: {reason_of(error)}") from error
            if refusal is not None:
                raise BadRequest(f"--program: {refusal.removeprefix(f'{PROGRAM_HEADER}: ')}", "program")


class _Error(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    error: _Error


async def _models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(url) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status} at {url}")
        try:
            data: list[Any] = _readable(await response.read())["data"]
            return [entry for entry in data if isinstance(entry, dict)]
        except (TypeError, LookupError) as error:
            raise ValueError(f"{url} does not return a list of models") from error


async def _ask(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            return _readable(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, *UNREADABLE):
        return None


def _readable(body: bytes) -> Any:
    """Decode JSON for a result file. Raise one of ``UNREADABLE`` if it is invalid or nested too deeply.

    (:mod:`json` would accept invalid Unicode text and invalid numbers.)
    """
    found = msgspec.json.decode(body)
    _require_flat(found, DEEPEST)
    return found


def _require_flat(found: Any, levels: int) -> None:
    if not levels:
        raise RecursionError(f"the JSON has more than {DEEPEST} levels")
    inner: Any = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()  # pyright: ignore
    for each in inner:
        _require_flat(each, levels - 1)


class ModelVocabulary:
    """The tokenizer of a checkpoint's directory or of a hub id.

    Raise :class:`~tercet.protocol.BadRequest` if it cannot be loaded.
    """

    def __init__(self, model: str) -> None:
        os.environ.setdefault(PARALLEL_TOKENIZERS, "false")
        from tokenizers import Tokenizer

        file = Path(model) / "tokenizer.json"
        if Path(model).exists() and not file.is_file():
            raise BadRequest(f"tokenizer: {model} has no tokenizer.json", "tokenizer")
        load = cast("Callable[[str], Any]", Tokenizer.from_file if file.is_file() else Tokenizer.from_pretrained)
        try:
            self._tokenizer = load(str(file) if file.is_file() else model)
        except Exception as error:  # the library raises plain Exception
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadRequest(f"tokenizer: cannot load {model}: {reason}", "tokenizer") from error
        self.size = int(self._tokenizer.get_vocab_size(with_added_tokens=False))
        self.special = frozenset[int](self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def fit_text(vocabulary: Vocabulary, tokens: Sequence[int], length: int) -> str:
    """Return a text of ``length`` tokens that begins as ``tokens`` do.

    Text and tokens do not map one to one: decoding and encoding again may change the count. The end of the text is
    therefore shortened or extended until the count is right, in at most eight tries.
    """
    text, kept = "", length
    for _ in range(8):
        text = vocabulary.decode(tokens[:kept]) if kept <= len(tokens) else text + " so" * (kept - len(tokens))
        excess = len(vocabulary.encode(text)) - length
        if excess == 0:
            return text
        kept = max(1, min(kept, len(tokens)) - excess)
    return text


@dataclass(frozen=True)
class Style:
    """The server, the model and the form of requests; ``extra`` are further fields of each body."""

    base_url: str
    model: str
    vocabulary: Vocabulary
    prompt_as: PromptAs = "tokens"
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    cache_salt: str | None = None


class Composer:
    """The writer of one conversation's requests; each contains the conversation so far.

    ``first`` is written at creation, before the clock of the run starts.
    """

    def __init__(self, style: Style, conversation: Conversation, index: int, warmups: int = 0) -> None:
        self._style = style
        self._conversation = conversation
        self._index = index
        self._warmups = warmups
        self._ids: list[int] = []
        self._turn = 0
        self.first = self._call()

    @property
    def think_time(self) -> float:
        """Seconds between the end of the last request and the start of the next one."""
        return self._conversation.turns[self._turn].think_time

    def heard(self, reading: Reading) -> PreparedCall | None:
        """Record the answer to the last request. Return the next request, or None at the end of the conversation."""
        self._turn += 1
        if self._turn == len(self._conversation.turns):
            return None
        self._ids += reading.token_ids or self._style.vocabulary.encode("".join(reading.text))
        return self._call()

    def unsent(self) -> Sequence[PreparedCall]:
        """Return the later requests, which cannot be sent because an answer is missing; their bodies are empty."""
        later = range(self._turn + 1, len(self._conversation.turns))
        return [self._describe(b"", self._conversation.turns[turn], turn, 0) for turn in later]

    def _call(self) -> PreparedCall:
        turn, style, as_text = self._conversation.turns[self._turn], self._style, self._style.prompt_as == "text"
        self._ids += turn.tokens
        prompt: Sequence[int] | str = self._ids
        if as_text and self._turn:
            prompt = style.vocabulary.decode(self._ids)
        elif as_text:
            prompt = fit_text(style.vocabulary, turn.tokens, len(turn.tokens)) if turn.text is None else turn.text
        body = body_of(
            style.model, prompt, turn.output_len, ignore_eos=style.ignore_eos, extra=style.extra,
            token_ids=len(self._conversation.turns) > 1 and not as_text, cache_salt=style.cache_salt,
        )  # fmt: skip
        return self._describe(body, turn, self._turn, len(self._ids))

    def _describe(self, body: bytes, turn: ConversationTurn, number: int, input_len: int) -> PreparedCall:
        return PreparedCall(
            index=self._index + number, url=self._style.base_url.rstrip("/") + COMPLETIONS, body=body,
            headers=self._style.headers, planned_input=input_len, planned_output=turn.output_len,
            warmup=self._index + number < self._warmups, phase=self._conversation.phase, group=self._conversation.group,
        )  # fmt: skip


def compose(style: Style, conversations: Sequence[Conversation], warmups: int = 0) -> list[Composer]:
    """Return one composer per conversation, with its first request. The first ``warmups`` requests are warm-up."""
    found: list[Composer] = []
    index = 0
    for conversation in conversations:
        found.append(Composer(style, conversation, index, warmups))
        index += conversation.requests
    return found


Observer = Callable[[RequestRow | None], object]
"""It is called with None when a request is due, and with the record of a request that has ended."""


class Traffic:
    """One run of a plan against a target. At the end, every request that was due has a record, also after a failure.

    - With ``due``, conversation ``i`` begins at ``due[i]`` seconds after the client's origin, at any speed of the
      target. ``concurrency`` limits the requests in flight; the scheduled time of a request includes no wait for that.
    - Without ``due``, each of ``concurrency`` users holds one conversation after the other.
    """

    def __init__(
        self,
        client: Client,
        plan: Sequence[Composer],
        due: Sequence[float] | None,
        concurrency: int | None,
        observer: Observer,
    ) -> None:
        self._client = client
        self._plan = plan
        self._due = due
        self._observer = observer
        self._users = concurrency or 1
        slots = asyncio.Semaphore(concurrency) if concurrency and due is not None else None
        self._slot: AbstractAsyncContextManager[Any] = slots or nullcontext()
        self._tasks = TaskSet()
        self._records: list[RequestRow] = []
        self._broken: BaseException | None = None
        self.interrupted = False

    def interrupt(self) -> None:
        """Send no more requests, and end those in flight. :meth:`run` then returns the results so far."""
        self.interrupted = True
        # Not immediately: a task that is cancelled before its first step never runs, and would leave no record.
        asyncio.get_running_loop().call_soon(self._tasks.cancel)

    async def run(self) -> list[RequestRow]:
        """Send all requests. Return the records, sorted by index, when all requests have ended."""
        if self.interrupted:
            return []
        if self._due is None:
            waiting = list(reversed(self._plan))
            for _ in range(min(self._users, len(waiting))):
                self._start(self._user(waiting))
        else:
            self._start(self._dispatch(self._due))
        try:
            while not await self._tasks.wait():
                pass  # running tasks have started others
        finally:
            self._tasks.cancel()
        if self._broken is not None:
            raise self._broken
        return sorted(self._records, key=lambda record: record.id)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(work).add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error  # a bug in this code: failures of the target are in records
            self.interrupt()

    async def _dispatch(self, due: Sequence[float]) -> None:
        for composer, at in zip(self._plan, due, strict=True):
            await self._until(at)
            if self.interrupted:
                return
            self._start(self._converse(composer, at))

    async def _user(self, waiting: list[Composer]) -> None:
        while waiting and not self.interrupted:
            await self._converse(waiting.pop(), self._client.now())

    async def _converse(self, composer: Composer, scheduled: float) -> None:
        call: PreparedCall | None = composer.first
        while call is not None:
            record, reading = await self._send(call, scheduled)
            if record.failure is not None:
                self._give_up(composer, record)
                return
            call = composer.heard(reading)
            if call is not None:
                scheduled = record.ended + composer.think_time
                await self._until(scheduled)

    async def _send(self, call: PreparedCall, scheduled: float) -> tuple[RequestRow, Reading]:
        self._observer(None)
        try:
            async with self._slot:
                record, reading = await self._client.send(call, scheduled)
        except asyncio.CancelledError:  # while it waited for a slot
            now, why = self._client.now(), "the run was interrupted before it was sent"
            record, reading = call.record(scheduled, now, now, failure="interrupted", error=why), Reading()
        self._note(record)
        return record, reading

    def _give_up(self, composer: Composer, failed: RequestRow) -> None:
        """Record the turns after a failed turn: they were due too, and count as separate failures."""
        why = f"request {failed.id}, an earlier turn of this session, failed"
        for call in () if failed.failure == "interrupted" else composer.unsent():
            self._note(call.record(failed.ended, failed.ended, failed.ended, failure="unsent", error=why))

    def _note(self, record: RequestRow) -> None:
        self._records.append(record)
        self._observer(record)

    async def _until(self, at: float) -> None:
        if (delay := at - self._client.now()) > 0:
            await asyncio.sleep(delay)


TERMINAL_SECONDS, PLAIN_SECONDS = 0.5, 10.0


class LiveProgress:
    """The progress of one point, an :data:`Observer`: a line that is rewritten on a terminal, elsewhere lines.

    It is written without a library, since every millisecond that it takes is an error in the time of a token.
    """

    def __init__(self, title: str, total: int, out: TextIO | None = None) -> None:
        self._title, self._total, self._out = title, total, out or sys.stderr
        self._began = time.monotonic()
        self._due = self._over = self._failed = self._tokens = 0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveProgress:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._out.isatty():
            self._write("\r\x1b[K")

    def __call__(self, record: RequestRow | None) -> None:
        """Record that a request is due, or how one has ended."""
        if record is None:
            self._due += 1
        else:
            self._over += 1
            self._failed += not record.ok
            self._tokens += record.output_tokens

    def line(self) -> str:
        """Return the state in one line."""
        seconds = time.monotonic() - self._began
        failed = f", {self._failed} failed" if self._failed else ""
        counts = f"{self._over}/{self._total}, {max(0, self._due - self._over)} in flight{failed}"
        return f"{self._title}: {counts}, {self._tokens / seconds:.0f} tokens/s, {seconds:.0f} s"

    async def _tick(self) -> None:
        terminal = self._out.isatty()
        while True:
            await asyncio.sleep(TERMINAL_SECONDS if terminal else PLAIN_SECONDS)
            self._write(f"\r\x1b[K{self.line()}" if terminal else f"{self.line()}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a closed pipe must not stop the run
            self._out.write(text)
            self._out.flush()
