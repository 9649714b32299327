"""The clients of a real router. They read streams of its OpenAI API as pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec

from tercet.protocol import EngineUnreachable, from_wire
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.sse import AnswerFailed, object_of, read_answer
from tercet.protocol.wire import UNREADABLE
from tercet_lab.chaos.client_load import AnswerBrokenOff, Arrival


class OpenAIClients:
    """The clients of the router at ``url``. Time limits of answers are checked later, in the records."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model

    async def ask(self, arrival: Arrival) -> AsyncIterator[Sequence[str]]:
        """Send a request and yield the text of each event. Raise :class:`~tercet.protocol.TercetError` if it fails."""
        question = arrival.question
        body = {
            "model": self._model, "prompt": list(question.prompt), "max_tokens": question.max_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        headers = {PROGRAM_HEADER: arrival.program, "x-request-id": arrival.name}
        try:
            async with self._session.post(self._url, json=body, headers=headers) as response:
                if response.status != 200:
                    raise from_wire(response.status, _decoded(await response.read()))
                whole = False
                async for data in read_answer(response.content.iter_any()):
                    event: dict[str, Any] = msgspec.json.decode(data)
                    for choice in event["choices"]:
                        reason = choice["finish_reason"]
                        whole = whole or reason is not None
                        if choice["text"]:
                            yield (choice["text"],)
                        if reason in ("abort", "error"):
                            raise AnswerBrokenOff(f"the answer ended with {reason}")
                if not whole:
                    raise AnswerBrokenOff("the answer ended without a finish reason")
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"the connection to the router failed: {error!r}") from error
        except AnswerFailed as error:
            said = object_of(error.event)
            raise from_wire(500, said) if "error" in said else AnswerBrokenOff(error.message) from error
        except UNREADABLE as error:
            raise AnswerBrokenOff(f"the answer does not match the API: {error}") from error


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return {"error": {"message": body[:200].decode(errors="replace")}}
