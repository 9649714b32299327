"""Whether tests run in full, as in `make test-long`, or in a short form."""

import os

import pytest

FULL = bool(os.environ.get("TERCET_LONG_TESTS"))
in_full = pytest.mark.skipif(not FULL, reason="make test-long runs it")
"""Marks a test that only `make test-long` runs; docs/howto/test.md lists each by name."""
