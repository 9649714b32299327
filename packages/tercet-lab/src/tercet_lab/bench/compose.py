"""The conversion of planned conversations to requests that are ready to send. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tercet_lab.bench.openai_client import Endpoint, Message, PreparedCall, PromptAs, Sampling, body_of, path_of
from tercet_lab.bench.stream_reader import Reading
from tercet_lab.bench.target import fit_text
from tercet_lab.bench.workloads import Conversation, ConversationTurn, Vocabulary


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
