"""A tiny Idefics 3: a vision tower before a Llama, with seeded random weights, and a processor that needs PIL alone."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from .checkpoints import made_once, save, with_tokens
from .families import SIZES

IMAGE_TOKEN = "<image>"
SIDE, PATCH = 336, 28
TOKENS_PER_IMAGE = (SIDE // PATCH) ** 2
"""More than a block."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def idefics3_config(image_token: int) -> Any:
    """Two layers of a vision tower before four of Llama."""
    from transformers import Idefics3Config

    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    text = {**SIZES, "vocab_size": 49280, "model_type": "llama"}
    return Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=image_token, scale_factor=1, tie_word_embeddings=False,
        pad_token_id=0,
    )  # fmt: skip


def vision_checkpoint() -> Path:
    """The directory of the checkpoint."""
    return made_once("idefics3", __file__, _write)


def _write(destination: Path) -> None:
    from transformers import Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil, Idefics3Processor

    tokenizer = with_tokens([IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"])
    config = idefics3_config(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    tokenizer.model_max_length = config.text_config.max_position_embeddings
    save(Idefics3ForConditionalGeneration, config, destination)
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(
        images, tokenizer, image_seq_len=TOKENS_PER_IMAGE, chat_template=TEMPLATE
    ).save_pretrained(destination)  # fmt: skip


def picture(seed: int) -> str:
    """A data URL of a picture, another one for each seed."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
