"""The process by which a router that is none of Ray's reaches objects in Ray's head.

``python -m tercet.cluster.on_ray.kept_objects_process ADDRESS``: a line of JSON in, ``[method, path, body]``, a line of
JSON out, ``[status, object]``. It ends with its input. Ray ends it when its head is away for long.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from tercet.cluster.on_ray.kept_objects import KeptObjects
from tercet.cluster.on_ray.ray_access import HeadStore

UNAVAILABLE = 503


def main(address: str) -> None:
    """Answer until there are no more questions."""
    objects = KeptObjects(HeadStore(address))
    for line in sys.stdin.buffer:
        method, path, body = msgspec.json.decode(line, type=tuple[str, str, dict[str, Any] | None])
        try:
            answer = objects.ask(method, path, body)
        except Exception as error:  # Ray's own, of a head that does not answer; the next question may find it better
            answer = (UNAVAILABLE, {"message": f"{type(error).__name__}: {error}"})
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
