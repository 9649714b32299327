"""A wall clock that is wrong for some processes only: a library that is loaded before the C library's own functions."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tercet.protocol import EngineError

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double off_by(void) {
    static volatile double *seconds;
    if (!seconds) {
        const char *path = getenv("TERCET_CLOCK_OFFSET");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return 0;
        void *page = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (page == MAP_FAILED) return 0;
        seconds = page;
    }
    return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += (time_t)off_by();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    if (!failed) { now->tv_sec = precise.tv_sec; now->tv_usec = precise.tv_nsec / 1000; }
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""
COMPILER = "cc"


def can_be_built() -> bool:
    """Whether this machine has a C compiler."""
    return shutil.which(COMPILER) is not None


def build(directory: Path) -> Path:
    """The library, compiled; raises :class:`~tercet.protocol.EngineError`."""
    library, source = directory / "wrong_clock.so", directory / "wrong_clock.c"
    source.write_text(SOURCE)
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the wrong clock cannot be compiled: {done.stderr.strip()[-400:]}")
    return library


class WrongClock:
    """The offset, in whole seconds, of the processes that are started with :attr:`env`. Use as a context manager."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.env = {"LD_PRELOAD": str(library), "TERCET_CLOCK_OFFSET": str(file)}

    def __enter__(self) -> Self:
        self._file.write_bytes(struct.pack("d", 0.0))
        with self._file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), 8)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._page.close()

    def step(self, seconds: float) -> None:
        """From now on the clock is that much ahead of the machine's; 0 makes it right."""
        self._page[:] = struct.pack("d", seconds)
