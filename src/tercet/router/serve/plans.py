"""Plans, which an operator sets, and the files that admin routes may name.

A *plan* is an operator's decision: the programs that share the traffic, and rules for requests with a separate program.
Admin routes may name files of programs and schedulings only below an operator's folders (:class:`NamedFiles`); errors
about files that do not load never quote their contents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.decisions.scheduling.assembly import user_file
from tercet.programs import BUILT_IN, Program, load_program
from tercet.protocol import BadRequest, Forbidden, TercetError
from tercet.protocol.names import require_text

LONGEST_PROGRAM_NAME = 1024
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_PROGRAM_NAME)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Args = Mapping[str, str | int | float | bool]
Source = Annotated[str, msgspec.Meta(max_length=1_000_000)]


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A program and its parameters. ``name`` is its name in metrics, traces and requests; by default ``program``.

    ``source`` is the text of the file in ``file.py:function``; if given, the file is not read.
    """

    program: Name
    args: Args = {}
    name: Name | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        _require_names(program=self.program, name=self.name)

    @property
    def label(self) -> str:
        """Name in metrics, traces and requests."""
        return self.name or self.program

    @property
    def same_as(self) -> tuple[str, dict[str, str], str | None]:
        """A value that is equal for arms that run the same code with the same parameters."""
        return self.program, self.texts, self.source

    @property
    def texts(self) -> dict[str, str]:
        """The parameters in the form of a command line."""
        return {key: as_text(value) for key, value in self.args.items()}


class Share(Arm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An arm of a split; its share of the requests is ``weight`` divided by the sum of all weights."""

    weight: Weight = 1.0


class Rule(Arm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An arm for certain requests, which the split does not affect.

    With ``header`` alone, the request must have that header; with ``value``, the header must have that value; with
    ``model``, the request must name the model so. A rule with a header and a model requires both.
    """

    header: Name | None = None
    value: str | None = None
    model: Name | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_names(header=self.header, value=self.value or None, model=self.model)
        if self.header is None and self.model is None:
            raise BadRequest(f"rules: the rule for {self.label} needs a header or a model", "rules")
        if self.value is not None and self.header is None:
            raise BadRequest("value: needs a header; give the rule a header", "value")

    def covers(self, headers: Mapping[str, str], model: str) -> bool:
        if self.model is not None and self.model != model:
            return False
        if self.header is None:
            return True
        found = headers.get(self.header.lower())
        return found is not None and self.value in (None, found)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of ``PUT /tercet/v1/program``: one ``program`` with its parameters, or a ``split``; and ``rules``.

    The first rule that covers a request decides. Other requests are split by weight at random. ``sticky`` is the name
    of a header: if given, the header's value decides, so that requests with the same value get the same arm.
    """

    program: Name | None = None
    args: Args = {}
    name: Name | None = None
    source: Source | None = None
    split: tuple[Share, ...] = ()
    rules: tuple[Rule, ...] = ()
    sticky: Name | None = None

    def __post_init__(self) -> None:
        _require_names(program=self.program, name=self.name, sticky=self.sticky)
        if (self.program is None) == (not self.split):
            raise BadRequest("program: give either a program or a split between several programs", "program")
        if self.args and self.program is None:
            raise BadRequest("args: need a program; in a split, give each program its args", "args")
        if self.name is not None and self.program is None:
            raise BadRequest("name: needs a program; in a split, give each program its name", "name")
        if self.source is not None and self.program is None:
            raise BadRequest("source: needs a program; in a split, give each program its source", "source")
        if self.sticky is not None and self.program is not None:
            raise BadRequest("sticky: needs a split; a single program gets every request", "sticky")
        if self.split and not 0 < self.total < float("inf"):
            raise BadRequest("weight: the weights of a split must be finite, and not all 0", "weight")
        seen: dict[str, Arm] = {}
        for arm in self.arms:
            # Metrics and traces count by label: two programs under one could not be distinguished.
            other = seen.setdefault(arm.label, arm)
            if other.same_as != arm.same_as:
                raise BadRequest(f"name: {arm.label} names two different programs; rename one of them", "name")

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of the split; one share with all requests for a single program."""
        return self.split or (Share(program=self.program or "", args=self.args, name=self.name, source=self.source),)

    @property
    def total(self) -> float:
        return sum(share.weight for share in self.shares)

    @property
    def arms(self) -> Iterator[Arm]:
        """Every program of the plan; the same program may occur twice."""
        yield from self.shares
        yield from self.rules


def _require_names(**given: str | None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for names that metrics, logs and headers could not show."""
    for field, name in given.items():
        if name is not None:
            require_text(name, field, LONGEST_PROGRAM_NAME)


def as_text(value: str | float | bool) -> str:
    """Return a parameter in the form of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


logger = logging.getLogger("tercet.router")
T = TypeVar("T")


class _PublicError(Exception):
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
        except _PublicError as public:
            raise public.error from None
        except BadRequest as error:
            # An error of a parser quotes what it read, which may be any file of the operator's account.
            if not names_files:
                raise
            logger.error("%s cannot be used: %s", name, error.message)
            raise BadRequest(f"{field}: {name} cannot be used; the router's log says why", field) from None

    def _locate(self, path: str, field: str, base: Path = Path()) -> Path:
        """Return the file's path with links resolved, so that the file that was checked is the one that is read."""
        try:
            # Links are followed before the check: one inside of a folder may lead out of it.
            file = (base / Path(path).expanduser()).resolve()
            is_named = file in self._files or any(file.is_relative_to(folder) for folder in self._folders)
            if is_named:
                return user_file(str(file), field)
        except BadRequest as error:
            raise _PublicError(error) from None
        except (OSError, RuntimeError, ValueError):  # a loop of links, an unknown user's home, an invalid name
            pass
        inline = "content" if field == "file" else "source"
        raise _PublicError(
            Forbidden(f"{field}: {path!r} is not in an --admin-folder of this router; send it as `{inline}`", field)
        )


def load_anywhere(arm: Arm) -> Program:
    """Return the program of an arm of a plan that comes from the operator's own files or flags."""
    return load_program(arm.program, arm.texts, arm.source)
