"""A tiny Qwen 2 Audio: an encoder of mel spectra before a Qwen 2, with seeded random weights."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

from .checkpoints import made_once, save, with_tokens
from .families import SIZES

RATE, SECONDS = 16000, 6
TOKENS_PER_SOUND = SECONDS * 25
"""More than a block."""
SOUND_TOKEN = "<|AUDIO|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def qwen_audio_config(sound_token: int) -> Any:
    """Two layers of an encoder before four of Qwen 2."""
    from transformers import Qwen2AudioConfig

    heard = {
        "num_mel_bins": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
        "max_source_positions": 1500,
    }  # fmt: skip
    text = {key: value for key, value in SIZES.items() if key not in ("head_dim", "tie_word_embeddings")}
    text |= {"hidden_size": 128, "vocab_size": 49280, "model_type": "qwen2", "tie_word_embeddings": False}
    return Qwen2AudioConfig(audio_config=heard, text_config=text, audio_token_index=sound_token)


def qwen_audio_checkpoint() -> Path:
    """The directory of the checkpoint."""
    return made_once("qwen2_audio", __file__, _write)


def _write(destination: Path) -> None:
    from transformers import Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = with_tokens([SOUND_TOKEN, "<|audio_bos|>", "<|audio_eos|>"])
    config = qwen_audio_config(tokenizer.convert_tokens_to_ids(SOUND_TOKEN))
    tokenizer.model_max_length = config.text_config.max_position_embeddings
    save(Qwen2AudioForConditionalGeneration, config, destination)
    _name_as_published(destination / "model.safetensors")
    heard = WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins)
    Qwen2AudioProcessor(heard, tokenizer, chat_template=TEMPLATE).save_pretrained(destination)


def _name_as_published(weights: Path) -> None:
    """Transformers nests the language model once more than the family's checkpoints do, which vLLM reads."""
    from safetensors.torch import load_file, save_file

    found = load_file(weights)
    nested = "language_model.model.model."
    named = {name.replace(nested, "language_model.model."): tensor for name, tensor in found.items()}
    save_file(named, weights, metadata={"format": "pt"})


def sound(seed: int) -> str:
    """A data URL of some seconds of chords, others for each seed."""
    import numpy as np

    random = np.random.default_rng(seed)
    time = np.arange(RATE) / RATE
    second = [np.sin(2 * np.pi * random.uniform(100, 4000, (5, 1)) * time).mean(0) for _ in range(SECONDS)]
    samples = (np.concatenate(second) * 20000).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return "data:audio/wav;base64," + base64.b64encode(buffer.getvalue()).decode()
