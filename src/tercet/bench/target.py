"""Asking a server who it is before it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tercet.protocol import BadRequest, EngineUnreachable

ASK_SECONDS = 10.0
# What Tercet's front door and vLLM tell about themselves; other servers answer 404, and that is fine.
MORE = {"version": "/version", "engines": "/tercet/v1/engines", "program": "/tercet/v1/program"}
LISTED = ("root", "max_model_len")


@dataclass(frozen=True)
class Target:
    """A server that answers. ``root`` is where it says that the model came from, if it does."""

    base_url: str
    model: str
    root: str | None
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def tokenizer(self) -> str:
        """Where the model's tokenizer most likely is: its checkpoint if it is on this machine, else its name."""
        return self.root if self.root and Path(self.root).is_dir() else self.model


async def ask_target(base_url: str, model: str | None, headers: Mapping[str, str]) -> Target:
    """Ask the server at ``base_url`` for its models and what else it tells.

    ``model`` is the one to use; the first that is served, if None. Raises
    :class:`~tercet.protocol.EngineUnreachable` when nobody answers, and :class:`~tercet.protocol.BadRequest` when it
    does not serve the model.
    """
    url = base_url.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        try:
            listed = await _models(session, f"{url}/v1/models")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or f"no answer within {ASK_SECONDS:.0f} s"
            raise EngineUnreachable(f"{url} does not answer as an OpenAI server: {reason}", "base-url") from error
        names = [str(entry.get("id")) for entry in listed]
        if model is None and not names:
            raise BadRequest(f"model: {url} lists none, and --model names none", "model")
        if model is not None and names and model not in names:
            raise BadRequest(f"model: {url} does not serve {model}; it serves {', '.join(names)}", "model")
        chosen = model or names[0]
        entry = next((entry for entry in listed if entry.get("id") == chosen), dict[str, Any]())
        root = entry.get("root")
        about = {name: told for name, path in MORE.items() if (told := await _ask(session, url + path)) is not None}
    about |= {"base_url": url, "model": chosen}
    about |= {name: entry[name] for name in LISTED if name in entry}
    return Target(url, chosen, root if isinstance(root, str) else None, about)


async def _models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(url) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status} at {url}")
        body = await response.json(content_type=None)
    data: Any = body.get("data") if isinstance(body, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(data, list):
        raise ValueError(f"{url} is no list of models")
    return [entry for entry in data if isinstance(entry, dict)]  # pyright: ignore[reportUnknownVariableType]


async def _ask(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError):
        return None
