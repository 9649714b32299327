"""vLLM's second model runner, which it takes on GPUs: between two engines, through buffers as there, on CPUs.

Its Triton kernels are interpreted (:mod:`.second_model_runner.sitecustomize`), so steps take long for a tiny model.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.gpu_report import random_model

from tercet.protocol import Request
from tercet.wire.client import HttpEngine
from tests.long_runs import FULL

from .conftest import settled
from .unlike import engines_with, hand_over

pytestmark = pytest.mark.verifies("vLLM's second model runner", transport="tcp")

pytest.importorskip("triton", reason="its kernels are Triton's")
STAGED = ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"kv_memory": "staged"}}))
FLAGS = {name: (core, "--max-num-seqs", "8", "--max-num-batched-tokens", "256", *STAGED)
         for name, core in (("source", "0"), ("target", "1"))}  # fmt: skip
TOKENS = 16


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The engines' URLs; both have said which model runner they have."""
    model, logs = random_model.make(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("second")
    here = Path(__file__).with_name("second_model_runner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONPATH", f"{here}:{os.environ.get('PYTHONPATH', '')}")
        with engines_with(FLAGS, str(model), logs) as found:
            for name in FLAGS:
                assert "Using V2 Model Runner" in (logs / f"{name}.log").read_text()
            yield found


def request(prompt: tuple[int, ...], salt: str, **params: Any) -> Request:
    return Request(
        seq_id=uuid.uuid4().hex,
        prompt=prompt,
        cache_salt=salt,
        sampling_params={"max_tokens": TOKENS, "ignore_eos": True, **params},
    )


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((7 * number + length) % 199 for number in range(length))


async def alone(url: str, prompt: tuple[int, ...], **params: Any) -> list[int]:
    async with HttpEngine("alone", url) as engine:
        outputs = engine.start_generate(request(prompt, uuid.uuid4().hex, **params))
        return [token async for output in outputs for token in output.token_ids]


LENGTHS = (1, 16, 17, 300) if FULL else (17,)


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_are_those_of_one_engine(urls: dict[str, str], length: int) -> None:
    """Within a block, at its end, behind it, and in several steps."""
    prompt = prompt_of(length)
    expected = await alone(urls["source"], prompt, temperature=0)
    async with HttpEngine("s", urls["source"]) as sender, HttpEngine("t", urls["target"]) as receiver:
        tokens, _ = await hand_over(sender, receiver, list(prompt), uuid.uuid4().hex, TOKENS)
        assert tokens == expected
        await settled(sender)
        await settled(receiver)


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "seeded penalties": {"temperature": 0.8, "seed": 11, "presence_penalty": 1.5},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "[a-c]{12}[0-9]{4}"}},
}


@pytest.mark.parametrize("how", HOW if FULL else ["seeded penalties"])
async def test_sequences_go_on_elsewhere_as_if_they_had_stayed(urls: dict[str, str], how: str) -> None:
    """With the output so far: the scheduler gives it to this runner, where the first one needs a hook."""
    params, prompt, salt = HOW[how], prompt_of(60), uuid.uuid4().hex
    expected = await alone(urls["source"], prompt, **params)
    first = tuple(expected[:7])
    async with HttpEngine("s", urls["source"]) as sender, HttpEngine("t", urls["target"]) as receiver:
        context = request((*prompt, *first), salt)
        end = len(context.prompt) - 1
        async with receiver.prep_recv(context, end) as space:
            await sender.remote_send(context, space, space.matched_len, end)
        going_on = request(prompt, salt, **params)
        tokens = [*first]
        async for output in receiver.start_generate(going_on, 0, first):
            tokens += output.token_ids
        assert tokens == expected
        await settled(sender)
        await settled(receiver)
