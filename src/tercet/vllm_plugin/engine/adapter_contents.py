"""What is at a LoRA adapter's path: a digest of its files, by which its KV goes, and a stamp that changes with them.

vLLM names KV by an adapter's name and path. So that other contents at a path get other names, the path is spelled in
another way for them: ``/models/a/.`` is the directory ``/models/a`` for whoever opens it.
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
# Who trained it on what, and where that lay, does not change what it computes.
IGNORED_KEYS = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "revision"})
READ_BYTES = 1 << 20
HERE = "/."
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Contents:
    """What was found in the directory ``root``: ``digest`` of its files, and ``stamp``, which changes when they do."""

    root: str
    digest: str
    stamp: Stamp

    @property
    def are_there(self) -> bool:
        """Whether the files are still those that were read."""
        return _stamp(self.stamp) == self.stamp

    def spellings(self, path: str) -> Iterator[str]:
        """``path``, and then ever more ways to write the same directory."""
        yield path
        spelled = self.root
        while True:
            spelled += HERE
            yield spelled


def read_contents(path: str) -> Contents:
    """What is at an adapter's path, all of it: adapters are small. Raises ``BadRequest`` if that is none."""
    root = Path(get_adapter_absolute_path(path))
    files = [root / CONFIG, *sorted(file for pattern in WEIGHTS for file in root.glob(pattern))]
    digest = hashlib.blake2b(digest_size=16)
    try:
        stamp = _stamp(tuple((str(file), 0, 0, 0) for file in files))
        config: dict[str, Any] = json.loads(files[0].read_bytes())
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
    """The files of a stamp as they are now; a file that is gone has none."""
    found: list[tuple[str, int, int, int]] = []
    for file, *_ in of:
        try:
            about = os.stat(file)
        except OSError:
            continue
        found.append((file, about.st_ino, about.st_mtime_ns, about.st_size))
    return tuple(found)
