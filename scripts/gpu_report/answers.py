"""The requests to servers: the latencies of tokens, and the tokens themselves."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from scripts.gpu_report.servers import model_of, post

from tercet.protocol.sse import AnswerReader

ROUNDS, WARM_UP = 15, 3
TOKENS = 64
PROMPTS = 24
STREAMS = 16
WORDS = ("the", "sea", "was", "calm", "and", "grey", "while", "a", "boat", "with", "one", "red", "sail", "went", "past")


class Latencies(NamedTuple):
    """The median latencies, in seconds: to the first token, between tokens of one stream, and of several streams."""

    first: float
    gap: float
    gap_of_several: float


def latencies(url: str, words: int) -> Latencies:
    """Measure streams one after the other, then several streams at the same time, all with different prompts."""
    model = model_of(url)
    found = [_stream(url, model, f"{secrets.token_hex(8)} {words_of(secrets.randbits(32), words)}")
             for _ in range(ROUNDS + WARM_UP)][WARM_UP:]  # fmt: skip
    several: list[tuple[float, float]] = []

    def one() -> None:
        several.append(_stream(url, model, f"{secrets.token_hex(8)} {words_of(secrets.randbits(32), 20)}"))

    threads = [threading.Thread(target=one) for _ in range(STREAMS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if len(several) < STREAMS:
        raise RuntimeError(f"{STREAMS - len(several)} of {STREAMS} concurrent streams failed; see above")
    return Latencies(
        median(first for first, _ in found), median(gap for _, gap in found), median(gap for _, gap in several)
    )


def _stream(url: str, model: str, prompt: str) -> tuple[float, float]:
    """Return the seconds to the first token of a stream, and the mean seconds between two later tokens."""
    begun = time.perf_counter()
    with post(url, {**_greedy(model, prompt), "stream": True}) as response:
        reader, chunks = AnswerReader(), iter(partial(response.read1, 65536), b"")
        times = [time.perf_counter() for chunk in chunks for _ in reader.events(chunk)]
        reader.end()
    if len(times) < 3:
        raise RuntimeError(f"a stream of {TOKENS} tokens has {len(times)} parts")
    return times[0] - begun, (times[-1] - times[1]) / (len(times) - 2)


def answers(url: str) -> list[str]:
    """Return a server's answers to fixed prompts, which are sent one after the other."""
    model, found = model_of(url), list[str]()
    for number in range(PROMPTS):
        with post(url, _greedy(model, words_of(number, 10 + 50 * (number % 20)))) as response:
            found.append(json.load(response)["choices"][0]["text"])
    return found


def words_of(seed: int, count: int) -> str:
    """Return ``count`` random words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _greedy(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
