"""A small profile whose times can be worked out by hand, and what tests do with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from tercet.protocol import Engine, Output, Request
from tercet_lab.sim import EngineOptions, Network, Profile, SimEngine
from tercet_lab.sim.step_times import ModelShape, Provenance, StepTimes, Transfer

BLOCK = 16
# A step takes 10 ms, and 1 ms more for each token past the first; contexts cost nothing.
PLAIN = StepTimes(knots=((1, 0.010), (1001, 1.010)), pair=0.0, context=0.0)


def profile_of(times: StepTimes = PLAIN, blocks: int = 1000, speed: float = 1e9, latency: float = 0.0) -> Profile:
    return Profile(
        name="test",
        model=ModelShape(name="m", layers=4, kv_heads=1, head_size=8, kv_dtype="float32", kv_dtype_bytes=4),
        device="paper",
        tp_size=1,
        block_size=BLOCK,
        total_blocks=blocks,
        max_model_len=100_000,
        steps=times,
        transfer=Transfer(bytes_per_second=speed, latency=latency),
        provenance=Provenance(source="made up", date="2026-11-21"),
    )


KV_BYTES = profile_of().model.kv_bytes_per_token


def engines_of(*names: str, profile: Profile | None = None, **options: object) -> list[SimEngine]:
    network = Network()
    settings = EngineOptions(**options)  # type: ignore[arg-type]
    return [SimEngine(name, profile or profile_of(), network, settings) for name in names]


def request_of(seq_id: str, length: int = 100, max_tokens: int = 5, first: int = 0) -> Request:
    return Request(
        seq_id=seq_id, prompt=tuple(range(first, first + length)), sampling_params={"max_tokens": max_tokens}
    )


async def collect(stream: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in stream]


async def tokens_of(engine: Engine, request: Request, begin: int = 0, output: tuple[int, ...] = ()) -> list[int]:
    async with aclosing(engine.start_generate(request, begin, output)) as stream:
        return [token async for item in stream for token in item.token_ids]


def is_empty(engine: SimEngine) -> bool:
    """Whether nothing is pinned and nothing runs."""
    return engine.pool.free == engine.pool.total and not engine.busy
