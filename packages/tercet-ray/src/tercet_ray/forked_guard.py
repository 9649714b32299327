"""Program that starts a guarded command outside its caller's children: ``python forked_guard.py LOG GUARD...``.

Standard input is the guard's pipe. When Ray ends a worker, it kills the worker's children at once, and a guard among
them could not end its engine. The guard is therefore a grandchild: this process forks it and exits. Standard output
gets the guard's process id. The program needs only the standard library.
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
