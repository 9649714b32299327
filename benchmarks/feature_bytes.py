"""The cost of sending a prompt's image to an engine: the size of a call in bytes, and CPU time at both ends.

``python benchmarks/feature_bytes.py`` measures tensors of the sizes that processors make from pictures, in four forms:
float32 or bfloat16, as JSON (base64) or as MessagePack. The engine computes in bfloat16 in all four cases, so its model
gets the same input; the script checks that. CPU time is that of this process, as the median of several runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from tercet.protocol.wire import StartGenerateCall
from tercet.vllm_plugin.mm_features import to_prompt, to_wire

# Shapes of the tensors that Hugging Face's processors make from one picture.
PICTURES = {
    "Idefics 3, 364 x 364": (1, 3, 364, 364),
    "LLaVA 1.5, 336 x 336": (3, 336, 336),
    "Qwen 2.5 VL, 1024 x 1024": (5329, 1176),
    "Qwen 2.5 VL, 2048 x 1536": (15987, 1176),
}
ENCODERS: dict[str, tuple[Callable[[StartGenerateCall], bytes], Callable[[bytes], StartGenerateCall]]] = {
    "JSON": (msgspec.json.encode, lambda body: msgspec.json.decode(body, type=StartGenerateCall)),
    "MessagePack": (msgspec.msgpack.encode, lambda body: msgspec.msgpack.decode(body, type=StartGenerateCall)),
}
TOKENS = 64


def spec_of(shape: tuple[int, ...]) -> MultiModalFeatureSpec:
    """Return a picture in the form of vLLM's processor."""
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    item = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())})
    return MultiModalFeatureSpec(item, "image", "vllms", PlaceholderRange(0, TOKENS), "vllms")


def call_of(spec: MultiModalFeatureSpec, dtype: str) -> StartGenerateCall:
    """Return a call with the picture for engines that compute in ``dtype``, as a router makes it."""
    return StartGenerateCall(prompt=[1] * (TOKENS + 1), seq_id="s", mm_features=(to_wire(spec, dtype),))


def given_to_the_model(call: StartGenerateCall) -> torch.Tensor:
    """Return the pixels of a call that the model of an engine gets, which computes in bfloat16."""
    prompt: Any = to_prompt([1] * (TOKENS + 1), call.mm_features, None, torch.bfloat16)
    return prompt["mm_kwargs"]["image"][0]["pixel_values"].data


def milliseconds(work: Callable[[], object], runs: int) -> float:
    """Return the median CPU time of ``work``, in milliseconds."""
    times: list[float] = []
    for _ in range(runs):
        before = time.process_time()
        work()
        times.append(time.process_time() - before)
    return statistics.median(times) * 1000


def row(shape: tuple[int, ...], dtype: str, encoder: str, runs: int) -> str:
    """Return a row of the table: bytes of the call, and milliseconds at both ends."""
    spec, (encode, decode) = spec_of(shape), ENCODERS[encoder]
    body = encode(call_of(spec, dtype))
    pixels: Any = spec.data and spec.data["pixel_values"].data
    if not torch.equal(given_to_the_model(decode(body)), pixels.to(torch.bfloat16)):
        raise SystemExit(f"{dtype} as {encoder}: the model gets different pixels")
    there = milliseconds(lambda: encode(call_of(spec, dtype)), runs)
    here = milliseconds(lambda: given_to_the_model(decode(body)), runs)
    return f"{len(body):,} | {there:.1f} | {here:.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure the cost of sending a prompt's image to an engine.")
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    print("| picture | travels as | bytes | router, ms | engine, ms |\n| --- | --- | ---: | ---: | ---: |")
    for picture, shape in PICTURES.items():
        for dtype in ("float32", "bfloat16"):
            for encoder in ENCODERS:
                print(f"| {picture} | {dtype}, {encoder} | {row(shape, dtype, encoder, runs)} |", flush=True)


if __name__ == "__main__":
    main()
