"""Synthetic traffic: when requests arrive, how long they are, and which prefixes they share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import msgspec

from tercet.protocol import BadRequest, Request

# Prompts are windows into one list of token ids, behind ids that make them unique.
_TEXT = 65_536
_FIRST_UNIQUE_TOKEN = 1_000_000


class SyntheticWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests to simulate. Lengths are tokens, drawn from a normal distribution and at least 1.

    ``rate`` is in requests per second. ``arrivals``: ``poisson``; ``constant``; ``gamma`` with a coefficient of
    variation of ``burstiness`` between arrivals. The first ``warm_up`` requests count in no metric. With ``prefixes``
    each request starts with one of so many prefixes of ``prefix`` tokens (drawn evenly), within its input length.
    """

    rate: float
    requests: int
    input_mean: float = 512
    input_dev: float = 0
    output_mean: float = 128
    output_dev: float = 0
    arrivals: Literal["poisson", "constant", "gamma"] = "poisson"
    burstiness: float = 2.0
    warm_up: int = 0
    prefixes: int = 0
    prefix: int = 0

    def __post_init__(self) -> None:
        """Raises :class:`~tercet.protocol.BadRequest` naming the first value that makes no sense."""
        for field in ("rate", "input_mean", "output_mean", "burstiness"):
            if not getattr(self, field) > 0:
                raise BadRequest(f"{field}: is {getattr(self, field)}, and must be positive", field)
        for field in ("input_dev", "output_dev", "warm_up", "prefixes", "prefix"):
            if not getattr(self, field) >= 0:
                raise BadRequest(f"{field}: is {getattr(self, field)}, and must not be negative", field)
        if self.requests <= self.warm_up:
            raise BadRequest(f"requests: {self.requests} leave none after {self.warm_up} of warm-up", "requests")
        if bool(self.prefixes) != bool(self.prefix):
            raise BadRequest("prefixes: goes with prefix, their number with their length", "prefixes")


def requests_of(workload: SyntheticWorkload, seed: int) -> Iterator[tuple[float, Request]]:
    """``(arrival time, request)`` in order of arrival; the same for the same seed."""
    when, chance = 0.0, random.Random(f"{seed} lengths")
    text = _text(seed) * 2
    prefixes = [_prompt(text, chance, index, workload.prefix) for index in range(workload.prefixes)]
    gaps = _gaps(workload, random.Random(f"{seed} arrivals"))
    for number in range(workload.requests):
        when += next(gaps)
        length = _length(chance, workload.input_mean, workload.input_dev)
        prefix = chance.choice(prefixes)[: length - 1] if prefixes else ()
        prompt = prefix + _prompt(text, chance, len(prefixes) + number, length - len(prefix))
        output = _length(chance, workload.output_mean, workload.output_dev)
        yield when, Request(seq_id=f"r{number}", prompt=prompt, sampling_params={"max_tokens": output})


@lru_cache(maxsize=4)
def _text(seed: int) -> tuple[int, ...]:
    chance = random.Random(f"{seed} text")
    return tuple(chance.randrange(32_000) for _ in range(_TEXT))


def _gaps(workload: SyntheticWorkload, chance: random.Random) -> Iterator[float]:
    """Seconds between arrivals."""
    mean = 1 / workload.rate
    if workload.arrivals == "constant":
        return itertools.repeat(mean)
    if workload.arrivals == "poisson":
        return iter(lambda: chance.expovariate(workload.rate), None)
    shape = 1 / workload.burstiness**2
    return iter(lambda: chance.gammavariate(shape, mean / shape), None)


def _length(chance: random.Random, mean: float, dev: float) -> int:
    return max(1, round(chance.gauss(mean, dev) if dev else mean))


def _prompt(text: tuple[int, ...], chance: random.Random, number: int, length: int) -> tuple[int, ...]:
    start = chance.randrange(_TEXT)
    body = text[start : start + length - 1] if length <= _TEXT else (text * (length // _TEXT + 1))[: length - 1]
    return (_FIRST_UNIQUE_TOKEN + number, *body)
