"""What tests on a device need: a device."""

from __future__ import annotations

import pytest
import torch


def why_not() -> str:
    """Why there is no device for these tests, in words; empty if there is one."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is not built for CUDA: the tests need the Python that has a CUDA vLLM"
    return "" if torch.cuda.is_available() else "PyTorch sees no CUDA device: nvidia-smi, CUDA_VISIBLE_DEVICES"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where there is none, with the reason."""
    if not (reason := why_not()):
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
