"""The command ``endpoint-picker-conformance``: the suite as it is installed, with pytest's own options behind it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def main() -> int:
    """Run the suite; what it returns is pytest's exit code."""
    own = ["--rootdir", str(HERE), "--import-mode=importlib", "-p", "no:cacheprovider"]
    loops = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    return int(pytest.main([*own, *loops, str(HERE), *sys.argv[1:]]))


if __name__ == "__main__":
    raise SystemExit(main())
