"""Whether tests run as long as what is claimed, as by `make test-long`, or only as much of that as takes a minute."""

import os

import pytest

FULL = bool(os.environ.get("TERCET_LONG_TESTS"))
in_full = pytest.mark.skipif(not FULL, reason="make test-long runs it")
"""Marks what `make test` leaves to the night; docs/howto/test.md lists it by name."""
