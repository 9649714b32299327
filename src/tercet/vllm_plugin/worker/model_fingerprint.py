"""The identity of a model: two engines with the same fingerprint compute the same KV."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Size of each of the three windows that are read of a weights file: enough to distinguish a fine-tune from its base
# without reading gigabytes.
WINDOW_BYTES = 64 * 1024
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
# The path of a config, and the library that loaded it, do not change the model.
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def model_fingerprint(model: str, hf_config: dict[str, Any]) -> str:
    """Return a short hash of a model's config and, for a local checkpoint, of samples of its weights."""
    digest = hashlib.sha256()
    kept = {key: value for key, value in hf_config.items() if key not in IGNORED_CONFIG_KEYS}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    path = Path(model)
    files = sorted(file for pattern in WEIGHTS for file in path.glob(pattern)) if path.is_dir() else []
    for file in files:
        _sample(file, digest)
    if not files:
        digest.update(model.encode())
    return digest.hexdigest()[:16]


def _sample(file: Path, digest: hashlib._Hash) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as opened:
        for offset in (0, max(0, size // 2), max(0, size - WINDOW_BYTES)):
            opened.seek(offset)
            digest.update(opened.read(WINDOW_BYTES))
