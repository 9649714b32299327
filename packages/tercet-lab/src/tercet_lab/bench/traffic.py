"""The sending of a plan's requests to the measured server, each when it is due or when a user is free.

Before that the server is asked what it is, and its model's tokenizer becomes the vocabulary of the workload; planned
conversations become requests that are ready to send. Progress is displayed: on a terminal as one line that is
rewritten, elsewhere as plain lines. It is written without a library, since every millisecond that it takes is an error
in the time of a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import aiohttp
import msgspec

from tercet.aio import TaskSet
from tercet.protocol import BadRequest, EngineUnreachable
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.wire.client.bounded_answers import reason_of
from tercet_lab.bench.openai_client import (
    Client,
    Endpoint,
    Message,
    PreparedCall,
    PromptAs,
    Reading,
    Sampling,
    body_of,
    path_of,
)
from tercet_lab.bench.results import RequestRecord
from tercet_lab.bench.workloads import Conversation, ConversationTurn, Vocabulary

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
        about = {name: told for name, path in MORE.items() if (told := await _ask(session, url + path)) is not None}
    about |= {"engine_versions": found} if (found := await _engine_versions(about.get("engines"))) else {}
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
                    refusal = await _refusal(response) if response.status == 400 else None
            except (aiohttp.ClientError, OSError, *UNREADABLE) as error:
                raise EngineUnreachable(f"cannot check program {program} at {url}: {reason_of(error)}") from error
            if refusal is not None:
                raise BadRequest(f"--program: {refusal.removeprefix(f'{PROGRAM_HEADER}: ')}", "program")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Return the message of an error in OpenAI's form. Raise one of ``UNREADABLE`` for any other answer."""
    return msgspec.json.decode(await response.read(), type=_Refused).error.message


class _Error(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    error: _Error


async def _engine_versions(engines: Any) -> list[str]:
    """Return the distinct versions of a router's engines. Engines that do not answer are left out."""
    if not isinstance(engines, list):
        return []
    listed = [cast("dict[str, Any]", engine) for engine in cast("list[object]", engines) if isinstance(engine, dict)]
    urls = [url for engine in listed if (url := str(engine.get("url"))).startswith("http")]
    # A new session without the router's headers: other servers must not get its key.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS)) as session:
        told = await asyncio.gather(*(_ask(session, f"{url}/version") for url in urls))
    answers = [cast("dict[str, Any]", each) for each in told if isinstance(each, dict)]
    return sorted({str(each["version"]) for each in answers if "version" in each})


async def _models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(url) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status} at {url}")
        body = _readable(await response.read())
    data: Any = body.get("data") if isinstance(body, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(data, list):
        raise ValueError(f"{url} does not return a list of models")
    return [entry for entry in data if isinstance(entry, dict)]  # pyright: ignore[reportUnknownVariableType]


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
        self.model = model
        os.environ.setdefault(PARALLEL_TOKENIZERS, "false")
        self._tokenizer = _load(model)
        self._size = int(self._tokenizer.get_vocab_size(with_added_tokens=False))
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(added)

    @property
    def size(self) -> int:
        return self._size

    @property
    def special(self) -> frozenset[int]:
        return self._special

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def chat_overhead(model: str, vocabulary: Vocabulary) -> int:
    """Return the number of tokens that the model's chat template adds to a single user message.

    Raise :class:`~tercet.protocol.BadRequest` if the template cannot be loaded or used.
    """
    from transformers import AutoTokenizer

    sample = "one two three"
    try:
        load = cast("Callable[..., Any]", AutoTokenizer.from_pretrained)  # pyright: ignore[reportUnknownMemberType]
        template = load(model, local_files_only=Path(model).exists())
        text = template.apply_chat_template(
            [{"role": "user", "content": sample}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template or a tokenizer may raise anything
        raise BadRequest(
            f"tokenizer: cannot use the chat template of {model}: {_first_line(error)}", "tokenizer"
        ) from error
    return len(vocabulary.encode(str(text))) - len(vocabulary.encode(sample))


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


def _load(model: str) -> Any:
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    load = cast("Callable[[str], Any]", Tokenizer.from_file if file.is_file() else Tokenizer.from_pretrained)
    if Path(model).exists() and not file.is_file():
        raise BadRequest(f"tokenizer: {model} has no tokenizer.json", "tokenizer")
    try:
        return load(str(file) if file.is_file() else model)
    except Exception as error:  # the library raises plain Exception
        raise BadRequest(f"tokenizer: cannot load {model}: {_first_line(error)}", "tokenizer") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Style:
    """The server, the model and the form of requests.

    ``overhead`` is the number of tokens that a chat template adds to a message. It is subtracted from generated
    messages, so that the whole prompt has the planned length, and added to the planned length of recorded texts.
    """

    base_url: str
    model: str
    vocabulary: Vocabulary
    endpoint: Endpoint = "completions"
    prompt_as: PromptAs = "tokens"
    sampling: Sampling = field(default_factory=Sampling)
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    overhead: int = 0
    cache_salt: str | None = None

    @property
    def url(self) -> str:
        """URL to which requests are sent."""
        return self.base_url.rstrip("/") + path_of(self.endpoint)


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
        self._template = 0
        self._messages: list[Message] = []
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
        said = "".join(reading.text)
        self._ids += reading.token_ids or self._style.vocabulary.encode(said)
        self._messages.append({"role": "assistant", "content": said})
        return self._call()

    def unsent(self) -> Sequence[PreparedCall]:
        """Return the later requests, which cannot be sent because an answer is missing; their bodies are empty."""
        later = range(self._turn + 1, len(self._conversation.turns))
        return [self._describe(b"", self._conversation.turns[turn], turn, 0) for turn in later]

    def _call(self) -> PreparedCall:
        turn = self._conversation.turns[self._turn]
        style = self._style
        self._ids += turn.tokens
        prompt: Any = self._ids
        if style.endpoint == "chat":
            self._messages.append({"role": "user", "content": self._text(turn, len(turn.tokens) - style.overhead)})
            self._template += style.overhead if turn.text is not None else 0
            prompt = self._messages
        elif style.prompt_as == "text":
            prompt = self._text(turn, len(turn.tokens)) if self._turn == 0 else style.vocabulary.decode(self._ids)
        body = body_of(
            style.model,
            prompt,
            turn.output_len,
            style.sampling,
            chat=style.endpoint == "chat",
            token_ids=len(self._conversation.turns) > 1 and style.prompt_as == "tokens" and style.endpoint != "chat",
            cache_salt=style.cache_salt,
        )
        return self._describe(body, turn, self._turn, len(self._ids) + self._template)

    def _text(self, turn: ConversationTurn, length: int) -> str:
        return turn.text if turn.text is not None else fit_text(self._style.vocabulary, turn.tokens, max(1, length))

    def _describe(self, body: bytes, turn: ConversationTurn, number: int, input_len: int) -> PreparedCall:
        return PreparedCall(
            index=self._index + number,
            url=self._style.url,
            body=body,
            headers=self._style.headers,
            planned_input=input_len,
            planned_output=turn.output_len,
            warmup=self._index + number < self._warmups,
            phase=self._conversation.phase,
            group=self._conversation.group,
        )


def compose(style: Style, conversations: Sequence[Conversation], warmups: int = 0) -> list[Composer]:
    """Return one composer per conversation, with its first request. The first ``warmups`` requests are warm-up."""
    found: list[Composer] = []
    index = 0
    for conversation in conversations:
        found.append(Composer(style, conversation, index, warmups))
        index += conversation.requests
    return found


class TrafficObserver(Protocol):
    """An observer of the progress of a run."""

    def due(self) -> None:
        """Record that a request is due."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """Record that a request has ended."""
        ...


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
        observer: TrafficObserver,
    ) -> None:
        self._client = client
        self._plan = plan
        self._due = due
        self._observer = observer
        self._users = concurrency or 1
        slots = asyncio.Semaphore(concurrency) if concurrency and due is not None else None
        self._slot: AbstractAsyncContextManager[Any] = slots or nullcontext()
        self._tasks = TaskSet()
        self._records: list[RequestRecord] = []
        self._broken: BaseException | None = None
        self.interrupted = False

    def interrupt(self) -> None:
        """Send no more requests, and end those in flight. :meth:`run` then returns the results so far."""
        self.interrupted = True
        # Not immediately: a task that is cancelled before its first step never runs, and would leave no record.
        asyncio.get_running_loop().call_soon(self._tasks.cancel)

    async def run(self) -> list[RequestRecord]:
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
        return sorted(self._records, key=lambda record: record.index)

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
            reading, record = await self._send(call, scheduled)
            if record.failure is not None:
                self._give_up(composer, record)
                return
            call = composer.heard(reading)
            if call is not None:
                scheduled = record.end + composer.think_time
                await self._until(scheduled)

    async def _send(self, call: PreparedCall, scheduled: float) -> tuple[Reading, RequestRecord]:
        self._observer.due()
        try:
            async with self._slot:
                answer = await self._client.send(call, scheduled)
        except asyncio.CancelledError:  # while it waited for a slot
            answer = self._client.never_sent(call, scheduled)
        self._note(answer.record)
        return answer.reading, answer.record

    def _give_up(self, composer: Composer, failed: RequestRecord) -> None:
        """Record the turns after a failed turn: they were due too, and count as separate failures."""
        for call in () if failed.failure == "interrupted" else composer.unsent():
            self._note(
                RequestRecord(
                    index=call.index, scheduled=failed.end, sent=failed.end, end=failed.end, failure="unsent",
                    error=f"request {failed.index}, an earlier turn of this session, failed",
                    planned_output=call.planned_output, warmup=call.warmup, phase=call.phase, group=call.group,
                )
            )  # fmt: skip

    def _note(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._observer.ended(record)

    async def _until(self, at: float) -> None:
        if (delay := at - self._client.now()) > 0:
            await asyncio.sleep(delay)


TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0
BAR = 20
RECENT = 50


class LiveProgress:
    """The live display of one point: an observer of its traffic, and an async context manager around the point."""

    def __init__(self, title: str, total: int, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._title = title
        self._total = total
        self._began = time.monotonic()
        self._due = self._over = self._failed = self._tokens = 0
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self._tpot: deque[float] = deque(maxlen=RECENT)
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveProgress:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._terminal:
            self._write("\r\x1b[K")

    def due(self) -> None:
        """Record that a request is due."""
        self._due += 1

    def ended(self, record: RequestRecord) -> None:
        """Record that a request has ended."""
        self._over += 1
        self._failed += not record.ok
        self._tokens += record.output_tokens
        if record.ok and record.ttft is not None:
            self._ttft.append(record.ttft)
        if record.ok and record.tpot is not None:
            self._tpot.append(record.tpot)

    def line(self) -> str:
        """Return the state in one line. Latencies are means over the last requests."""
        seconds = time.monotonic() - self._began
        parts = [f"{self._over}/{self._total}", f"{max(0, self._due - self._over)} in flight"]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [f"TTFT {_mean(self._ttft):.0f} ms"] if self._ttft else []
        parts += [f"TPOT {_mean(self._tpot):.1f} ms"] if self._tpot else []
        return f"{self._title}: " + ", ".join([*parts, f"{self._tokens / seconds:.0f} tokens/s", f"{seconds:.0f} s"])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)
            if self._terminal:
                filled = BAR * self._over // max(1, self._total)
                self._write(f"\r\x1b[K[{'#' * filled}{'.' * (BAR - filled)}] {self.line()}")
            else:
                self._write(f"{self.line()}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a closed pipe must not stop the run
            self._out.write(text)
            self._out.flush()


def _mean(seconds: deque[float]) -> float:
    return sum(seconds) / len(seconds) * 1000
