"""An error at each await of an endless loop of the product: it is logged once, and the loop goes on and works again."""

from __future__ import annotations

import ast
import asyncio
import errno
import functools
import importlib
import inspect
import linecache
import logging
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from operator import attrgetter
from types import CodeType
from typing import Any
from unittest.mock import patch

from tercet.aio import tasks
from tercet.aio.tasks import TaskSet
from tests.longest_wait import LONGEST_WAIT_S
from tests.sources import PACKAGES, PRODUCT

SOURCES = tuple(str(top) for top in (PRODUCT, *PACKAGES.values()))
TIMES = 3
"""How often in a row each await fails: a missing descriptor is missing for a while."""
Place = tuple[tuple[CodeType, int], ...]
"""The awaits of the product at which a coroutine is suspended, as code and line, outermost first."""
Works = Callable[[], Awaitable[object]]
Started = Callable[[], AbstractAsyncContextManager[Works]]


def missing_descriptor() -> Exception:
    return OSError(errno.EMFILE, "Too many open files")


def unforeseen() -> Exception:
    return RuntimeError("unforeseen")


class Faults:
    """The errors of one run: at ``place``, :data:`TIMES` times. Without a place it only notes all places."""

    def __init__(self, place: Place | None = None, error: Callable[[], Exception] = unforeseen) -> None:
        self._place, self.error = place, error
        self.left = 0 if place is None else TIMES
        self.seen: dict[Place, None] = {}
        self.are_over = False

    def strikes(self, place: Place) -> bool:
        """True if the await at ``place`` fails now."""
        if self.are_over:
            return False
        self.seen[place] = None
        if place != self._place or not self.left:
            return False
        self.left -= 1
        return True


class Faulty:
    """An awaitable that runs a coroutine; at an await that :class:`Faults` strike, the error comes at once."""

    def __init__(self, work: Coroutine[Any, Any, object], faults: Faults) -> None:
        self._work, self._faults = work, faults

    def __await__(self) -> Generator[Any, Any, object]:
        value: Any = None
        fault: BaseException | None = None
        while True:
            try:
                waited = self._work.send(value) if fault is None else self._work.throw(fault)
            except StopIteration as end:
                return end.value
            value = fault = None
            if self._faults.strikes(_place_of(self._work)):
                fault = self._faults.error()
                if waited is not None:
                    waited._asyncio_future_blocking = False
                    waited.cancel()
                continue
            try:
                value = yield waited
            except BaseException as raised:
                fault = raised


def _place_of(work: Any) -> Place:
    found: list[tuple[CodeType, int]] = []
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
        if frame is not None and frame.f_code.co_filename.startswith(SOURCES):
            found.append((frame.f_code, frame.f_lineno))
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    return tuple(found)


def _awaits_of(loop: Callable[..., object]) -> list[range]:
    """Return the lines of each await in the ``while True`` of a coroutine function."""
    lines, first = inspect.getsourcelines(loop)
    body = ast.parse(textwrap.dedent("".join(lines)))
    ways = [each for each in ast.walk(body) if isinstance(each, ast.While) and ast.unparse(each.test) == "True"]
    found = [each for way in ways for each in ast.walk(way) if isinstance(each, ast.Await | ast.AsyncFor)]
    assert found
    return [range(first + each.lineno - 1, first + (each.end_lineno or each.lineno)) for each in found]


async def with_an_error_at_each_await(row: str, started: Started, ends_at: str = "") -> None:
    """Run the loop ``row`` of the table ENDLESS, with errors at each of its awaits and at those of what it awaits.

    ``started`` starts it as the product does, and yields a function that returns once the loop has done its task anew.
    A connection that breaks at the line ``ends_at`` has ended as usual, and is not logged.
    """
    place, _, name = row.partition(":")
    dotted = place.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(dotted if dotted.startswith("tercet_") else f"tercet.{dotted}")
    *owners, attribute = name.split(".")
    owner = attrgetter(".".join(owners))(module) if owners else module
    loop = getattr(owner, attribute)

    async def run(faults: Faults) -> list[logging.LogRecord]:
        @functools.wraps(loop)
        async def faulty(*given: Any, **named: Any) -> object:
            return await Faulty(loop(*given, **named), faults)

        with patch.object(owner, attribute, faulty), patch.object(tasks, "AGAIN_S", 0.001), _logged() as records:
            async with asyncio.timeout(LONGEST_WAIT_S), started() as works:
                await works()
                while faults.left:
                    await works()
                    await asyncio.sleep(0)
                await works()
                faults.are_over = True
        return records

    unharmed = Faults()
    await run(unharmed)
    code = inspect.unwrap(loop).__code__
    lines = {line for each in unharmed.seen for at, line in each if at is code}
    missed = [each.start for each in _awaits_of(loop) if not lines & {*each}]
    assert not missed, f"{row}: the loop has never waited at the awaits of lines {missed}: let `works` reach them"
    for each in unharmed.seen:
        for error in (missing_descriptor, unforeseen):
            text = str(error()).rpartition("] ")[2]
            records = await run(Faults(each, error))
            said = [record for record in records if text in record.getMessage()]
            at, line = each[-1]
            is_usual = error is missing_descriptor and linecache.getline(at.co_filename, line).strip() == ends_at
            assert len(said) == (0 if is_usual else 1), (
                f"{row}, {text!r} at {each[-1]}: {[record.getMessage() for record in records]}"
            )


class _logged(logging.Handler):
    """The records of warnings and errors while entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> list[logging.LogRecord]:
        # Not at the root: a process that has set up its log lines does not pass them there.
        logging.getLogger("tercet").addHandler(self)
        return self.records

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tercet").removeHandler(self)


@asynccontextmanager
async def kept(work: Callable[[], Awaitable[object]], works: Works) -> AsyncGenerator[Works]:
    """Keep ``work`` by a :class:`~tercet.aio.tasks.TaskSet`, as the assembly of a process does."""
    background = TaskSet()
    task = background.keep(work, "loop")
    try:
        yield works
        assert not task.done()
    finally:
        await background.close()
