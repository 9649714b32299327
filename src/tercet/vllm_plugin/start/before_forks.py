"""The import of vLLM, and what a process that has imported it computes once, so that processes forked from it need not.

Relies on vLLM's tokenizers and chat templates being cached by name, in ``cached_get_tokenizer`` and
``_try_get_processor_chat_template``; if a version of vLLM has other names, each process loads them itself. Relies on
tokenizers of ``transformers`` having ``get_vocab``, ``encode``, and ``chat_template``; inner tokenizers of
``tokenizers`` have their merges in ``to_str``. Missing parts are left out of a fingerprint.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from tercet.aio.files import stamp_of
from tercet.aio.importing import frames_without_source, import_late, without_collections
from tercet.protocol.addresses import TextFingerprint
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.vllm_plugin.hooks import Side, UnsupportedVLLM, require_hooks

logger = logging.getLogger(__name__)
# vLLM imports this module for audio of another sampling rate; it imports SciPy's statistics, a tenth of the import
# time.
RESAMPLING = "scipy.signal"
# vLLM lets compiled models fall back to its own operators, by a list in this module. With the module, most of
# PyTorch's compiler is imported, a twelfth of the import time.
LOWERING = "torch._inductor.lowering"


@contextmanager
def light_import(*, compiles: bool) -> Generator[None]:
    """Import vLLM while entered: without garbage collections and audio; without Inductor too, unless ``compiles``.

    Relies on ``vllm.env_override``: it leaves a list of Inductor's that has ``_vllm_patched`` as it is. A later import
    of Inductor finds the real module, which compiles vLLM's operators as any others.
    """
    import_late(RESAMPLING)
    with without_collections(), frames_without_source():
        if compiles or LOWERING in sys.modules:
            yield
            return
        import_late(LOWERING)
        placeholder: Any = sys.modules[LOWERING]
        placeholder.FALLBACK_ALLOW_LIST = SimpleNamespace(_vllm_patched=True)
        try:
            yield
        finally:
            if sys.modules.get(LOWERING) is placeholder:
                del sys.modules[LOWERING]


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
    try:
        return [(path, stamp_of(path)) for path in sorted(checkpoint.iterdir())]
    except OSError:
        return None


# ---- the identity of a model's text: with another one, the same token ids have other meanings ------------------------


# Texts on which normalizers, splitters and special tokens differ: their encodings distinguish tokenizers with the same
# vocabulary, whichever library or version they come from.
TRIED = (
    "The quick brown fox jumps over the lazy dog, isn't it?  1234567890 3.14159 -42e10",
    "\n\n\tdef f(x):\n        return x  \r\n",
    "\u00c7a fait d\u00e9j\u00e0 na\u00efve \uff26\uff35\uff2c\uff2c \ufb01 \u03a9 \u00df \u1e9e \u0130 \u0131 e\u0301",
    "\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0e44\u0e17\u0e22",
    "\u00a0\u2003\u200b\ufeff \U0001f469\u200d\U0001f467 \U0001f388",
    " <s></s><|im_start|>user<|endoftext|>[INST] <unk> </think>",
    "UPPER lower MiXeD camelCaseWords snake_case_words http://example.org/a?b=c&d=%20 a@b.c",
)


_last: list[tuple[Any, TextFingerprint]] = []
"""The last tokenizer with its fingerprint: a process and those forked from it ask for the same one."""


def text_fingerprint(tokenizer: Any) -> TextFingerprint:
    """Return the fingerprint of the checkpoint's tokenizer and chat template; empty for missing or failing ones."""
    if not (_last and _last[0][0] is tokenizer):  # compared by identity: a tokenizer need not be hashable
        _last[:] = [(tokenizer, _computed(tokenizer))]
    return _last[0][1]


def _computed(tokenizer: Any) -> TextFingerprint:
    try:
        digest = hashlib.sha256()
        for part in _of_tokenizer(tokenizer):
            digest.update(b"%d:" % len(part) + part)  # with its length, so that no two lists of parts look the same
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            return TextFingerprint(digest.hexdigest()[:16])
        said = template if isinstance(template, str) else msgspec.json.encode(template, order="sorted").decode()
        return TextFingerprint(digest.hexdigest()[:16], hashlib.sha256(said.encode()).hexdigest()[:16])
    except Exception as error:  # a tokenizer is code of its model; its failures must not keep the engine from starting
        logger.warning("this tokenizer cannot be compared with others: %s: %s", type(error).__name__, error)
        return TextFingerprint()


def _of_tokenizer(tokenizer: Any) -> Iterator[bytes]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    yield msgspec.json.encode(sorted((number, token) for token, number in vocabulary.items()))
    for text in TRIED:
        for special in (False, True):
            yield msgspec.json.encode(list(map(int, tokenizer.encode(text, add_special_tokens=special))))
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        # The pairs that become one token, in order; newer files have them as pairs, older ones as texts.
        pairs: list[Any] = msgspec.json.decode(backend.to_str()).get("model", {}).get("merges") or []
        yield msgspec.json.encode([pair.split(" ") if isinstance(pair, str) else pair for pair in pairs])
