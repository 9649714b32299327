"""A wrong wall clock for chosen processes: a library that is loaded before the C library."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Self

from tercet.protocol import EngineError

SOURCE = Path(__file__).with_name("wrong_clock.c")
COMPILER = "cc"


def can_be_built() -> bool:
    """True if this machine has a C compiler."""
    return shutil.which(COMPILER) is not None


def build(directory: Path) -> Path:
    """Compile the library into ``directory`` and return its path. Raise ``EngineError`` if that fails."""
    library = directory / "wrong_clock.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"cannot compile the wrong clock: {done.stderr.strip()[-400:]}")
    return library


class WrongClock:
    """The clock offset, in whole seconds, of processes that are started with :attr:`env`. Use as a context manager."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.env = {"LD_PRELOAD": str(library), "TERCET_CLOCK_OFFSET": str(file)}

    def __enter__(self) -> Self:
        self._file.write_bytes(struct.pack("d", 0.0))
        with self._file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), 8)
        return self

    def __exit__(self, *_: object) -> None:
        self._page.close()

    def step(self, seconds: float) -> None:
        """Set the clock ``seconds`` ahead of the machine's; 0 makes it right."""
        self._page[:] = struct.pack("d", seconds)
