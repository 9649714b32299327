"""The process through which a router, which is not a process of Ray, reads and changes objects in Ray's head.

``python -m tercet_ray.kept_objects_process ADDRESS`` reads lines of JSON, ``[method, path, body]``, and
answers each with a line of JSON, ``[status, object]``. It exits at the end of its input. Ray ends it when Ray's head
does not answer for a long time.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from tercet_ray.kept_objects import KeptObjects
from tercet_ray.ray_access import HeadStore

UNAVAILABLE = 503


def main(address: str) -> None:
    """Answer calls until the end of standard input."""
    objects = KeptObjects(HeadStore(address))
    for line in sys.stdin.buffer:
        method, path, body = msgspec.json.decode(line, type=tuple[str, str, dict[str, Any] | None])
        try:
            answer = objects.ask(method, path, body)
        except Exception as error:  # Ray's error: its head does not answer; a later call may succeed
            answer = (UNAVAILABLE, {"message": f"{type(error).__name__}: {error}"})
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
