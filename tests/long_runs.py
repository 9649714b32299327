"""Whether tests run in full, as in `make test-long`, or in a short form."""

import os

import pytest

FULL = bool(os.environ.get("TERCET_LONG_TESTS"))


def in_full(instead: str) -> pytest.MarkDecorator:
    """Marks a test that only `make test-long` runs; `instead` says what `make test` has for the same code."""
    return pytest.mark.skipif(not FULL, reason=f"make test-long runs it; make test: {instead}")
