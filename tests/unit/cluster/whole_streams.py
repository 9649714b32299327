"""A stream of the completions API that must be whole: read by clients while something happens to the fleet."""

from __future__ import annotations

import aiohttp
import msgspec


async def read_whole(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> None:
    """Ask for ``tokens`` tokens, and fail unless all of them come, without an error."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = (await response.read()).decode()
    assert response.status == 200, text
    assert '"error"' not in text, text
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert msgspec.json.decode(events[-2])["usage"]["completion_tokens"] == tokens, text
