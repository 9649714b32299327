"""``tercet chat``: a conversation with a running router, in the terminal or through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tercet.cli.router_calls import ApiKey
from tercet.cli.setting_flags import flags_as_records
from tercet.cli.terminal import note, write
from tercet.cli.which_fleet import WhichFleet, others_in_words
from tercet.protocol import BadRequest, EngineError, EngineUnreachable, TercetError
from tercet.protocol.access import given_key
from tercet.protocol.sse import read_answer
from tercet.protocol.wire import UNREADABLE
from tercet.wire.callers import bearer

if TYPE_CHECKING:
    import aiohttp

# Longest time between two tokens, and longest wait of a request in the router's queue.
READ_SECONDS = 300.0
PROMPT = "> "
Message = dict[str, str]


@flags_as_records
def chat(
    which: WhichFleet,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Name of the model.", show_default="the router's model")] = None,
    system: Annotated[str | None, typer.Option(help="System message, which sets the model's behaviour.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature, as in OpenAI's API.")] = None,
) -> None:
    """Chat with a running fleet; each question is sent with the conversation so far.

    Ctrl-C ends an answer. Ctrl-D, or Ctrl-C at the prompt, ends the chat. Text from a pipe is one question.

    Examples:
    - `tercet chat`
    - `echo hello | tercet chat --max-tokens 50`
    """
    given = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    talk = Chat(which.router_url().rstrip("/"), api_key, options, system)
    if not sys.stdin.isatty():
        try:
            question = sys.stdin.read().strip()
            # Such text would fail later, in the encoder of the request.
            question.encode()  # bytes that are not text were read as surrogates
        except UnicodeError as error:
            raise BadRequest("standard input: is not UTF-8", "stdin") from error
        if not question:
            raise BadRequest("standard input: is empty; write a question into it", "stdin")
        _answer(talk, question, max_tokens)
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # arrow keys and history, if this Python has readline
    asyncio.run(talk.find_model())
    note(f"{talk.model} at {talk.url}; Ctrl-C ends an answer, Ctrl-D the chat")
    while True:
        try:
            question = input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if not question:
            continue
        try:
            _answer(talk, question, max_tokens)
        except KeyboardInterrupt:  # this and an error end the answer, not the chat
            note("\n(ended)")
        except TercetError as error:
            note(f"\ntercet: {error.message}")


def _answer(talk: Chat, question: str, max_tokens: int) -> None:
    """Print one answer, with a note if the token limit cut it."""
    reason = asyncio.run(talk.ask(question, write))
    write("\n")
    if reason == "length":
        note(f"(cut after {max_tokens} tokens; --max-tokens sets another limit)")


class Chat:
    """A conversation with the router at ``url``; ``options`` are fields of each request, as are the ``headers``.

    ``trace`` is that of the last answer, if the headers ask for it.
    """

    def __init__(
        self, url: str, api_key: str | None, options: dict[str, Any], system: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        self.url = url
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.trace: Any = None
        self._headers = {**bearer(given_key(api_key, "--api-key")), **headers}
        self._options = options

    @property
    def model(self) -> str:
        """The model's name; empty until it is known."""
        return self._options.get("model", "")

    async def find_model(self) -> None:
        """Ask the router for its model, unless one is given. Raises :class:`~tercet.protocol.TercetError`."""
        if self.model:
            return
        async with self._request("GET", "/v1/models") as response:
            try:
                self._options["model"] = msgspec.json.decode(await response.read())["data"][0]["id"]
            except (*UNREADABLE, KeyError, IndexError, TypeError) as error:
                raise EngineUnreachable(f"the server at {self.url} is not a router", "url") from error

    async def ask(self, question: str, show: Callable[[str], object]) -> str:
        """Ask, pass the answer's text to ``show`` as it arrives, and return the server's finish reason.

        A partial answer is added to the conversation; a question without any answer is not. Raises
        :class:`~tercet.protocol.TercetError`.
        """
        await self.find_model()
        asked: Message = {"role": "user", "content": question}
        body = {**self._options, "messages": [*self.messages, asked], "stream": True}
        answer, finish_reason = "", ""
        try:
            async with self._request("POST", "/v1/chat/completions", body) as response:
                async for event in _events(response.content.iter_any()):
                    self.trace = event.trace or self.trace
                    for choice in event.choices:
                        answer += choice.delta.content or ""
                        show(choice.delta.content or "")
                        finish_reason = choice.finish_reason or finish_reason
        finally:
            # What was shown stays part of the conversation, also if the answer was cut off.
            if answer:
                self.messages += [asked, {"role": "assistant", "content": answer}]
        return finish_reason

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: Any = None) -> AsyncGenerator[aiohttp.ClientResponse]:
        import aiohttp

        from tercet.wire.client.bounded_answers import reason_of

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=READ_SECONDS)
        headers = {"content-type": "application/json", **self._headers}
        data, has_begun = None if body is None else msgspec.json.encode(body), False
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, f"{self.url}{path}", data=data, headers=headers) as response,
            ):
                if response.status != 200:
                    raise EngineError(f"{self.url} answered {response.status}: {_message(await response.read())}")
                has_begun = True
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if has_begun:
                raise EngineUnreachable(f"the router's answer was interrupted: {reason_of(error)}", "url") from error
            # Only if nothing listens there: a router that answers was the right one.
            others = others_in_words(self.url) if isinstance(error, aiohttp.ClientConnectorError) else ""
            raise EngineUnreachable(f"no router answers at {self.url}: {reason_of(error)}{others}", "url") from error


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    trace: Any = msgspec.field(default=None, name="tercet")


async def _events(chunks: AsyncIterable[bytes]) -> AsyncIterator[_Event]:
    """Yield each event of a stream until its end.

    Raises :class:`~tercet.protocol.EngineError` if an event is an error, or the stream ends early.
    """
    async for data in read_answer(chunks):
        try:
            event = msgspec.json.decode(data, type=_Event)
        except UNREADABLE as error:
            raise EngineError(f"the answer cannot be read: {error}") from error
        yield event  # outside of the try block: an error of the reader is not one of the answer


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or the whole body."""
    with contextlib.suppress(*UNREADABLE, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return body.decode(errors="replace").strip()
