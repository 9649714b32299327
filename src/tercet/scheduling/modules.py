"""The user's own Python files: programs and plugins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from tercet.protocol import BadRequest


def load_module(file: Path, field: str) -> ModuleType:
    """The file's module, from its text of now; raises :class:`~tercet.protocol.BadRequest` that names ``field``.

    Not through the import system: that may answer from its cache what a file contained less than a second ago.
    """
    name = f"tercet_file_{file.absolute().as_posix()}"
    module, before = ModuleType(name), sys.modules.get(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise BadRequest(f"{field}: {file} failed to load: {type(error).__name__}: {error}", field) from error
    return module
