"""Families whose prompts have pictures, videos and sound beside text, and what the tests put into them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .images import TOKENS_PER_IMAGE, picture, vision_checkpoint
from .qwen_vl import (
    TOKENS_PER_PICTURE,
    TOKENS_PER_VIDEO,
    qwen_vl_checkpoint,
    upright_or_turned,
    video,
    with_torchvision,
)
from .sounds import TOKENS_PER_SOUND, qwen_audio_checkpoint, sound


@dataclass(frozen=True)
class FeatureFamily:
    """``part`` makes another part of a chat message for each number, of ``tokens`` tokens, which a block ends within.

    ``notes`` says what is special about it. Engines are started within ``needing``.
    """

    title: str
    modality: str
    checkpoint: Callable[[], Path]
    part: Callable[[int], dict[str, Any]]
    tokens: int
    notes: str = ""
    needing: Callable[[], AbstractContextManager[None]] = nullcontext


def _url(kind: str, of: Callable[[int], str]) -> Callable[[int], dict[str, Any]]:
    def part(number: int) -> dict[str, Any]:
        return {"type": kind, kind: {"url": of(number)}}

    return part


M_ROPE = "positions in three dimensions, by the grid (M-RoPE)"
FEATURE_FAMILIES: dict[str, FeatureFamily] = {
    "idefics3": FeatureFamily(
        "Idefics 3", "image", vision_checkpoint, _url("image_url", picture), TOKENS_PER_IMAGE
    ),
    "qwen2_5_vl": FeatureFamily(
        "Qwen 2.5 VL", "image", qwen_vl_checkpoint, _url("image_url", upright_or_turned), TOKENS_PER_PICTURE, M_ROPE,
        with_torchvision,
    ),
    "qwen2_5_vl_video": FeatureFamily(
        "Qwen 2.5 VL", "video", qwen_vl_checkpoint, _url("video_url", video), TOKENS_PER_VIDEO, f"{M_ROPE} and by time",
        with_torchvision,
    ),
    "qwen2_audio": FeatureFamily(
        "Qwen 2 Audio", "audio", qwen_audio_checkpoint, _url("audio_url", sound), TOKENS_PER_SOUND
    ),
}  # fmt: skip
