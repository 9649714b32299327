"""These tests' processes are forked from one import, too."""

from tests.engines.conftest import one_import

__all__ = ("one_import",)
