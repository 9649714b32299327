"""Starts a guarded command that is not a child of its caller: ``python forked_guard.py LOG GUARD...``, a pipe as stdin.

Ray kills the children of a worker that it ends at once, the guard among them, before it could end its engine. So the
guard is a grandchild: this process forks it and ends. Standard output gets the guard's process id. It needs only the
standard library.
"""

from __future__ import annotations

import os
import sys


def main(log: str, guard: list[str]) -> None:
    """Fork the guard into a separate process group, with its output in ``log``, and print its id."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    child = os.fork()
    if child:
        print(child, flush=True)
        return
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execv(guard[0], guard)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
