"""The contents of a LoRA adapter's path: a digest of its files, which identifies its KV, and a stamp to detect changes.

vLLM names KV by an adapter's name and path. To give KV of other contents at the same path another name, the path is
spelled differently: ``/models/a/.`` opens the same directory as ``/models/a``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.utils import get_adapter_absolute_path

from tercet.protocol import BadRequest

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.*", "new_embeddings.*")
# The training data and the base model's path do not change what an adapter computes.
IGNORED_KEYS = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "revision"})
READ_BYTES = 1 << 20
HERE = "/."
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Contents:
    """The contents of the directory ``root``: ``digest`` of its files, and ``stamp``, which changes with the files."""

    root: str
    digest: str
    stamp: Stamp

    @property
    def are_there(self) -> bool:
        """True if the files are still those that were read."""
        return _stamp(self.stamp) == self.stamp

    def spellings(self, path: str) -> Iterator[str]:
        """Yield ``path``, and then an endless series of other spellings of the same directory."""
        yield path
        spelled = self.root
        while True:
            spelled += HERE
            yield spelled


def read_contents(path: str) -> Contents:
    """Read all files at an adapter's path: adapters are small. Raises ``BadRequest`` if there is no adapter."""
    root = Path(get_adapter_absolute_path(path))
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = [root / CONFIG, *sorted(file for pattern in WEIGHTS for file in root.glob(pattern))]
        stamp = _stamp(tuple((str(file), 0, 0, 0) for file in files))
        config: Any = json.loads(files[0].read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} is not a JSON object")
        kept = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for file in files[1:]:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while part := opened.read(READ_BYTES):
                    digest.update(part)
    except (OSError, ValueError) as error:
        raise BadRequest(f"path: {path} has no adapter: {error}", "path") from error
    return Contents(str(root), digest.hexdigest(), stamp)


def _stamp(of: Stamp) -> Stamp:
    """Return the present stamp of the files in ``of``, without missing files."""
    found: list[tuple[str, int, int, int]] = []
    for file, *_ in of:
        try:
            about = os.stat(file)
        except OSError:
            continue
        found.append((file, about.st_ino, about.st_mtime_ns, about.st_size))
    return tuple(found)
