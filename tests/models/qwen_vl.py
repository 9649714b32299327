"""A tiny Qwen 2.5 VL: pictures and videos, whose tokens have positions in three dimensions, by their grid.

vLLM's model and the processors want torchvision, which `make test-models` puts into a folder of its own.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .checkpoints import made_once, save, with_tokens
from .families import SIZES

PATCH, MERGED, FRAMES_TOGETHER = 4, 2, 2
UNIT = PATCH * MERGED
"""Pixels of a token's side."""
GRID = (11, 13)
"""Tokens of a picture's sides: another grid if it is turned, and as many tokens, more than a block."""
FRAMES, FRAME_GRID = 6, (7, 8)
TOKENS_PER_PICTURE = GRID[0] * GRID[1]
TOKENS_PER_VIDEO = FRAMES // FRAMES_TOGETHER * FRAME_GRID[0] * FRAME_GRID[1]
TORCHVISION = Path(__file__).parents[2] / "build" / "torchvision"
WITHOUT_OPERATORS = Path(__file__).parent / "without_operators"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def qwen_vl_config(token: dict[str, int]) -> Any:
    """Two layers of a vision tower, one of which looks within windows, before four of Qwen 2."""
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": PATCH,
        "spatial_merge_size": MERGED, "temporal_patch_size": FRAMES_TOGETHER, "window_size": 4 * UNIT,
        "out_hidden_size": 128, "fullatt_block_indexes": [1], "tokens_per_second": 4,
    }  # fmt: skip
    text = {key: value for key, value in SIZES.items() if key not in ("head_dim", "tie_word_embeddings")}
    # vLLM's CPU kernels know heads of 32, and a head's 16 angles are of time, height and width.
    text |= {"hidden_size": 128, "vocab_size": 49280}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    return Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, tie_word_embeddings=False,
        image_token_id=token["<|image_pad|>"], video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"], vision_end_token_id=token["<|vision_end|>"],
    )  # fmt: skip


def qwen_vl_checkpoint() -> Path:
    """The directory of the checkpoint."""
    return made_once("qwen2_5_vl", __file__, _write)


def _write(destination: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = with_tokens(special)
    config = qwen_vl_config({name: tokenizer.convert_tokens_to_ids(name) for name in special})
    tokenizer.model_max_length = config.text_config.max_position_embeddings
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(destination)
    save(Qwen2_5_VLForConditionalGeneration, config, destination)
    for what, name in (("image", "preprocessor_config"), ("video", "video_preprocessor_config")):
        sizes: dict[str, Any] = {
            "patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": FRAMES_TOGETHER,
        }  # fmt: skip
        sizes["size"] = {"shortest_edge": 4 * UNIT**2, "longest_edge": 256 * UNIT**2}
        kind = {f"{what}_processor_type": f"Qwen2VL{what.capitalize()}Processor"}
        (destination / f"{name}.json").write_text(
            json.dumps({"processor_class": "Qwen2_5_VLProcessor", **kind, **sizes})
        )


@contextmanager
def with_torchvision() -> Generator[None]:
    """While entered, processes that are started find it; skips the test where it has not been put there."""
    if not TORCHVISION.exists():
        pytest.skip(f"no torchvision: pip install --no-deps --target {TORCHVISION} -r requirements/models.txt")
    path = os.pathsep.join([str(WITHOUT_OPERATORS), str(TORCHVISION), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path.strip(os.pathsep))
        yield


def upright_or_turned(seed: int) -> str:
    """A data URL of a picture, another one for each seed; every second one is as wide as the others are high."""
    high, wide = GRID if seed % 2 else GRID[::-1]
    return "data:image/png;base64," + _pixels(seed, high, wide, "PNG")


def video(seed: int) -> str:
    """A data URL of a video, another one for each seed, as a sequence of JPEG pictures."""
    frames: Sequence[str] = [_pixels(100 * seed + number, *FRAME_GRID, "JPEG") for number in range(FRAMES)]
    return "data:video/jpeg;base64," + ",".join(frames)


def _pixels(seed: int, high: int, wide: int, kind: str) -> str:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((wide * UNIT, high * UNIT), Image.Resampling.NEAREST).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()
