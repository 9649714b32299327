"""Names that clients choose: ids of requests, sessions, users, salts. Each is bounded once, where it enters a server.

A client decides neither how many bytes a server keeps nor how many it logs or copies with each token: a name that is
longer than its bound is replaced by its beginning and a digest, so two long names that differ stay different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

LONGEST_NAME = 128
"""Maximum characters of a name that is kept as its client wrote it."""
# Characters of a digest in a shortened name, and of the digest that stands for a client.
_DIGEST, _OWNER = 32, 16


def kept_name(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a client's name as it is kept, logged and passed on.

    It is the name itself, unless that has more than ``longest`` characters or characters that cannot be printed: then
    it is the beginning of the name, in ASCII, and a digest of the whole name, with at most ``longest`` characters.
    """
    if len(name) <= longest and name.isprintable():
        return name
    beginning = name[: longest - _DIGEST - 1]
    readable = "".join(each if each.isascii() and each.isprintable() else "_" for each in beginning)
    return f"{readable}-{_digest(name)[:_DIGEST]}"


def owned_name(name: str, headers: Mapping[str, str]) -> str:
    """Return a session's name among those of all clients: equal names of clients with different keys differ.

    The client is known by the key in its ``authorization`` header, which cannot be read from the result. All processes
    of a fleet return the same for the same client. Clients without a key are one client.
    """
    kept, key = kept_name(name), headers.get("authorization", "").partition(" ")[2]  # the scheme has any case
    return f"{kept}@{_digest(f'{len(key)} {key} {kept}')[:_OWNER]}" if key else kept


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
