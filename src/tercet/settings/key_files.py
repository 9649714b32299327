"""Files of keys, one on each line, which servers reload while they run."""

from __future__ import annotations

from pathlib import Path

from tercet.aio.files import read_whole
from tercet.protocol import BadRequest

LARGEST_FILE = 1024 * 1024


class KeyFile:
    """The keys in the file ``path``; errors begin with the setting ``name``. Lines that begin with # are comments."""

    def __init__(self, path: str, name: str) -> None:
        self._path = Path(path).expanduser()
        self._name = name

    def read(self) -> tuple[str, ...]:
        """Return the keys that the file has now; an empty file has none.

        Raises :class:`~tercet.protocol.BadRequest` if the file cannot be read, or a line cannot be a key. The error
        has the number of the line, and never its text, which may be a secret.
        """
        try:
            content = read_whole(self._path, LARGEST_FILE)  # not a pipe: the file is read again when it changes
        except FileNotFoundError as error:
            raise BadRequest(f"{self._name}: the file {self._path} does not exist", self._name) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadRequest(f"{self._name}: {self._path} cannot be read: {reason}", self._name) from error
        lines = [line.strip() for line in content.splitlines()]
        found = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith(b"#")]
        for number, line in found:
            if not all(0x21 <= byte <= 0x7E for byte in line):
                raise BadRequest(
                    f"{self._name}: line {number} of {self._path} is not a key: use printable ASCII without spaces",
                    self._name,
                )
        return tuple(line.decode() for _, line in found)

    def first(self) -> tuple[str, ...]:
        """Return :meth:`read` when a server starts; raise :class:`~tercet.protocol.BadRequest` if there is no key."""
        keys = self.read()
        if not keys:
            raise BadRequest(f"{self._name}: {self._path} has no key; write one on each line", self._name)
        return keys
