"""A lighter import of vLLM; the lightest is for processes that compile no model: routers, and engines on CPU cores."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tercet.aio.importing import frames_without_source, import_late, without_collections

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
