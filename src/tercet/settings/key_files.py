"""Files of keys: one on each line, looked at again while a server runs."""

from __future__ import annotations

from pathlib import Path

from tercet.protocol import BadRequest

LARGEST_FILE = 1024 * 1024


class KeyFile:
    """The keys in the file at ``path``; ``name`` is the setting that says so. Lines that begin with # are comments."""

    def __init__(self, path: str, name: str) -> None:
        self._path = Path(path).expanduser()
        self._name = name

    def read(self) -> tuple[str, ...]:
        """The keys that are there now; none in an empty file.

        Raises :class:`~tercet.protocol.BadRequest` for a file that cannot be read, or has a line that cannot be a key.
        It tells the number of a line, and nothing that stands there.
        """
        try:
            if not self._path.is_file():
                raise BadRequest(f"{self._name}: there is no file {self._path}", self._name)
            with self._path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadRequest(f"{self._name}: {self._path} cannot be read: {reason}", self._name) from error
        if len(content) > LARGEST_FILE:
            raise BadRequest(f"{self._name}: {self._path} has more than {LARGEST_FILE} bytes", self._name)
        lines = [line.strip() for line in content.splitlines()]
        found = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith(b"#")]
        for number, line in found:
            if not all(0x21 <= byte <= 0x7E for byte in line):
                raise BadRequest(
                    f"{self._name}: line {number} of {self._path} cannot be a key: printable ASCII, no spaces",
                    self._name,
                )
        return tuple(line.decode() for _, line in found)

    def first(self) -> tuple[str, ...]:
        """As :meth:`read`, at the start of a server: raises :class:`~tercet.protocol.BadRequest` for a file of none."""
        keys = self.read()
        if not keys:
            raise BadRequest(f"{self._name}: there is no key in {self._path}", self._name)
        return keys
