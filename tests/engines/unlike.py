"""Engines of one model that are started differently, with no router; and what one of them hands over to another."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tercet.protocol import Request
from tercet.wire.client import HttpEngine
from tests.warm import spec_of

from .conftest import free_port, settled, until_answering
from .processes import EnginePlace
from .prompts import complete, prompt_of, tokens_of


@contextmanager
def engines_with(flags: Mapping[str, Sequence[str]], model: str, logs: Path) -> Generator[dict[str, str]]:
    """An engine for each name: the cores of its workers, then flags of vLLM's. Their URLs, once all answer."""
    places: dict[str, EnginePlace] = {}
    try:
        for name, (cores, *more) in flags.items():
            spec = spec_of(name, free_port(), "--max-model-len", "2048", *more, model=model)
            chosen = tuple(int(core) for core in cores.split("|"))
            place = places[name] = EnginePlace.of(msgspec.structs.replace(spec, cores=chosen), logs / f"{name}.log")
            place.start()
        until_answering(list(places.values()))
        yield {name: place.url for name, place in places.items()}
    finally:
        for place in places.values():
            # How vLLM ends is not what is tested here: with several workers on few cores it may hang at its end.
            place.stop(kill_after=20)


async def hand_over(
    source: HttpEngine, target: HttpEngine, prompt: list[int], salt: str, num_tokens: int = 12
) -> tuple[list[int], int]:
    """Prefill on one engine and decode on the other; the tokens, and how many tokens were received."""
    request = Request(
        seq_id=uuid.uuid4().hex,
        prompt=tuple(prompt),
        cache_salt=salt,
        sampling_params={"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True},
    )
    async with target.prep_recv(request) as space:
        sent = await source.remote_send(request, space, space.matched_len, sample=True)
        assert sent.first is not None
        tokens, received = [*sent.first.token_ids], 0
        async for output in target.start_generate(request, sent.end, sent.first.token_ids):
            tokens += output.token_ids
            received += output.usage.received if output.usage is not None else 0
    return tokens, received


async def require_same_tokens(source_url: str, target_url: str, alone_url: str, lengths: Sequence[int]) -> None:
    """Hand prompts of some lengths over: all KV must arrive, and the tokens must be those of one engine alone."""
    async with HttpEngine("source", source_url) as sender, HttpEngine("target", target_url) as receiver:
        for length in lengths:
            prompt = prompt_of(length, seed=length)
            alone = await complete(alone_url, prompt, cache_salt=uuid.uuid4().hex, ignore_eos=True)
            tokens, received = await hand_over(sender, receiver, prompt, uuid.uuid4().hex)
            assert tokens == tokens_of(alone)
            assert received == length
        await settled(sender)
        await settled(receiver)
