"""What a process that has imported vLLM computes once, so that the processes forked from it need not.

Relies on vLLM's tokenizers and chat templates being cached by name, in ``cached_get_tokenizer`` and
``_try_get_processor_chat_template``. If a version of vLLM has other names, each process loads them itself.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tercet.engine.text_fingerprint import text_fingerprint
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.vllm_plugin.hooks import Side, UnsupportedVLLM, require_hooks

# What vLLM's tokenizer of a checkpoint in a directory is cached by, unless flags choose otherwise.
BY_DEFAULT = {"runner_type": "generate", "tokenizer_mode": "auto", "revision": None, "trust_remote_code": False}
_loaded: dict[Path, object] = {}
"""The files of each checkpoint whose tokenizer was loaded, as they were at that time."""


def check_hooks(*sides: Side) -> None:
    """Compare the installed vLLM with these sides' hooks. Forks of this process that require them find the result.

    A mismatch is not reported here, but by each process that requires the hooks.
    """
    for side in sides:
        with suppress(UnsupportedVLLM):
            require_hooks(side)


def load_tokenizer(checkpoint: Path) -> None:
    """Load the tokenizer and the chat template in the directory ``checkpoint`` into vLLM's caches, for forks.

    A model that is not a directory on this machine is not looked for. A failure is not reported here: it is repeated,
    and reported, by each process that loads the tokenizer.
    """
    files = _files(checkpoint)
    if files is None:
        return
    with _one_thread(), suppress(Exception):  # a tokenizer is code of its model
        from vllm.tokenizers.registry import cached_get_tokenizer

        tokenizer: Any = cached_get_tokenizer(str(checkpoint), **BY_DEFAULT)
        _loaded[checkpoint] = files
        _renderers()._try_get_processor_chat_template(
            tokenizer, revision=None, code_revision=None, trust_remote_code=False
        )
        text_fingerprint(tokenizer)


def forget_changed_tokenizer() -> None:
    """Clear vLLM's caches of tokenizers if the files of a checkpoint have changed since its tokenizer was loaded."""
    if any(_files(checkpoint) != files for checkpoint, files in _loaded.items()):
        _forget_tokenizers()


def _forget_tokenizers() -> None:
    from vllm.tokenizers.registry import cached_get_tokenizer

    _loaded.clear()
    cached_get_tokenizer.cache_clear()
    hf = _renderers()
    hf._PROCESSOR_CHAT_TEMPLATES.clear()
    hf.cached_get_processor.cache_clear()


def _renderers() -> Any:
    return importlib.import_module("vllm.renderers.hf")


@contextmanager
def _one_thread() -> Generator[None]:
    """Keep tokenizers from starting threads while entered: a process with threads cannot be forked."""
    before = os.environ.get(PARALLEL_TOKENIZERS)
    os.environ[PARALLEL_TOKENIZERS] = "false"
    try:
        yield
    finally:
        del os.environ[PARALLEL_TOKENIZERS]
        if before is not None:
            os.environ[PARALLEL_TOKENIZERS] = before


def _files(checkpoint: Path) -> object:
    """Return the names, sizes and times of the files in a directory; None if it cannot be read."""
    try:
        found = [(path.name, path.stat()) for path in checkpoint.iterdir()]
    except OSError:
        return None
    return sorted((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found)
