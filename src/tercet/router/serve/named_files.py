"""Files that admin routes may name. Errors about files that do not load never quote their contents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.decisions.scheduling.registry import user_file
from tercet.programs import BUILT_IN, Program, load_program
from tercet.protocol import BadRequest, Forbidden, TercetError
from tercet.router.serve.routing import Arm

logger = logging.getLogger("tercet.router")
T = TypeVar("T")


class _Told(Exception):
    """Raised with an ``error`` that callers may see, since it does not concern the contents of a file."""

    def __init__(self, error: TercetError) -> None:
        super().__init__(error.message)
        self.error = error


class NamedFiles:
    """The files that requests may name: those below ``folders``, and ``files`` that an operator named in settings."""

    def __init__(self, folders: Iterable[str] = (), files: Iterable[str] = ()) -> None:
        self._folders = [Path(folder).expanduser().resolve() for folder in folders]
        self._files = {Path(file).expanduser().resolve() for file in files}

    def load_arm(self, arm: Arm) -> Program:
        """Return the program of an arm of a plan.

        Raises :class:`~tercet.protocol.TercetError` if the file may not be named or does not load.
        """
        names_files = any(":" in text for text in arm.texts.values())
        if arm.source is None:
            names_files |= arm.program not in BUILT_IN and ":" in arm.program
        return self._quietly(
            "program", arm.program, names_files, lambda: load_program(arm.program, arm.texts, arm.source, self._locate)
        )

    def load_scheduling(self, file: str, content: str | None = None) -> Scheduling:
        """Return the scheduling of a file, or of ``content``.

        Raises :class:`~tercet.protocol.TercetError` if the file may not be named or does not load.
        """

        def load() -> Scheduling:
            path = self._locate(file, "file") if content is None else Path(file)
            # A file in the operator's folders may name any other file.
            return load_scheduling(path, content, user_file if content is None else self._locate)

        return self._quietly("file", file, content is None, load)

    def _quietly(self, field: str, name: str, names_files: bool, load: Callable[[], T]) -> T:
        try:
            return load()
        except _Told as told:
            raise told.error from None
        except BadRequest as error:
            if not names_files:
                raise
            logger.error("%s cannot be used: %s", name, error.message)
            raise BadRequest(f"{field}: {name} cannot be used; the router's log says why", field) from None

    def _locate(self, path: str, field: str, base: Path = Path()) -> Path:
        """Return the file's path with links resolved, so that the file that was checked is the one that is read."""
        try:
            file = (base / Path(path).expanduser()).resolve()
            is_named = file in self._files or any(file.is_relative_to(folder) for folder in self._folders)
            if is_named:
                return user_file(str(file), field)
        except BadRequest as error:
            raise _Told(error) from None
        except (OSError, RuntimeError, ValueError):  # a loop of links, an unknown user's home, an invalid name
            pass
        inline = "content" if field == "file" else "source"
        raise _Told(
            Forbidden(f"{field}: {path!r} is not in an --admin-folder of this router; send it as `{inline}`", field)
        )


def load_anywhere(arm: Arm) -> Program:
    """Return the program of an arm of a plan that comes from the operator's own files or flags."""
    return load_program(arm.program, arm.texts, arm.source)
