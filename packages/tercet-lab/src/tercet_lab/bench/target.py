"""The measured server: its identity, and its model's tokenizer as the vocabulary of workloads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec

from tercet.protocol import BadRequest, EngineUnreachable
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.settings.variables import PARALLEL_TOKENIZERS
from tercet.wire.client.bounded_answers import reason_of
from tercet_lab.bench.workloads import Vocabulary

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
