"""Tests in processes that are forked after the collection: ``pytest --forks 2``.

All test files, and torch and vLLM with them, are imported once, and workers share the memory. The workers take a chunk
of one file's tests at a time, and send reports and warnings to the parent.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from signal import SIGKILL
from types import TracebackType
from typing import Any, Self

import pytest

CHUNK = 20
# A chunk has a fifth as many tests if they take seconds: the workers end at nearly the same time.
LONG, LONG_WEIGHT = frozenset({"processes", "slow"}), 5
NUMBER = struct.Struct("=I")
TERMINAL = ("terminalreporter", "terminalprogress")


def chunks_of(items: Sequence[pytest.Item]) -> list[range]:
    """Return ranges of indices: successive tests of one file, with a weight of at most ``CHUNK`` together."""
    found = list[range]()
    begin = weight = 0
    for index, item in enumerate(items):
        own = LONG_WEIGHT if any(mark.name in LONG for mark in item.iter_markers()) else 1
        if index > begin and (item.path != items[begin].path or weight + own > CHUNK):
            found.append(range(begin, index))
            begin, weight = index, 0
        weight += own
    if items:
        found.append(range(begin, len(items)))
    return found


@dataclass(eq=False)
class Worker:
    """A forked process, as the parent sees it; ``running`` is the index of its test, ``ended`` is True at its end."""

    pid: int
    inbox: Connection
    running: int | None = None
    ended: bool = False

    def kill(self) -> int:
        """End the process. Return its wait status."""
        os.kill(self.pid, SIGKILL)
        self.inbox.close()
        return os.waitpid(self.pid, 0)[1]


@dataclass(eq=False)
class Outbox:
    """A plugin of a worker: sends reports and warnings to the parent, those of a test together."""

    config: pytest.Config
    connection: Connection
    held: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.held.append(("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        said = (str(warning_message.message), warning_message.category.__name__)
        self.held.append(("warning", (*said, warning_message.filename, warning_message.lineno, when, nodeid, location)))

    def begin(self, index: int) -> None:
        self.connection.send(("begin", index))

    def end(self, index: int) -> None:
        self.connection.send(("end", (index, self.held)))
        self.held = []


class ForkedRun:
    """A plugin: runs the collected tests in ``workers`` forked processes."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says so
        if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
            raise pytest.UsageError(f"--forks: these threads were started while tests were imported: {others}")
        with _Parent(session, self._workers) as parent:
            parent.run()
        return True


class _Parent:
    """The process that has collected: it forks workers, and passes to pytest what they send."""

    def __init__(self, session: pytest.Session, workers: int) -> None:
        self._session, self._hook = session, session.config.hook
        self._left = set(range(len(session.items)))
        self._workers, self._broken = list[Worker](), list[str]()
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False  # tests of several files take turns
        # Made here, once: a worker that made it would remove it at its end, with the files of the others.
        temporary: Any = getattr(session.config, "_tmp_path_factory")  # noqa: B009
        temporary.getbasetemp()
        chunks = chunks_of(session.items)
        queue, filled = os.pipe()
        os.set_blocking(filled, False)  # a session whose chunks do not fit into a pipe fails, and does not hang
        os.write(filled, b"".join(NUMBER.pack(number) for number in range(len(chunks))))
        os.close(filled)
        for _ in range(workers):
            self._workers.append(self._forked(chunks, queue))
        os.close(queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.kill()

    def run(self) -> None:
        """Pass on what workers send, until all have ended."""
        while running := {worker.inbox: worker for worker in self._workers if not worker.ended}:
            for inbox in wait(list(running)):
                self._received(running[inbox])  # pyright: ignore[reportArgumentType]
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        for index in sorted(self._left):
            self._failed(index, "the test did not run, since its worker process had ended")

    def _received(self, worker: Worker) -> None:
        try:
            kind, content = worker.inbox.recv()
        except EOFError:
            worker.ended = True
            if worker.running is not None:
                self._failed(worker.running, "\n".join(("the worker process ended in this test", *self._broken)))
            return
        match kind:
            case "begin":
                worker.running = content
            case "broken":
                self._broken.append(content)
            case "done":  # processes that a test has left behind may keep the connection open
                worker.ended = True
            case _:
                worker.running, (index, said) = None, content
                self._passed_on(index, said)

    def _passed_on(self, index: int, said: Sequence[tuple[str, Any]]) -> None:
        item = self._session.items[index]
        self._left.discard(index)
        self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for kind, content in said:
            if kind == "report":
                report = self._hook.pytest_report_from_serializable(config=self._session.config, data=content)
                self._hook.pytest_runtest_logreport(report=report)
            else:
                text, category, filename, line, when, nodeid, location = content
                message = warnings.WarningMessage(text, type(category, (Warning,), {}), filename, line)
                self._hook.pytest_warning_recorded.call_historic(
                    kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
                )
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _failed(self, index: int, why: str) -> None:
        item = self._session.items[index]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        data = self._hook.pytest_report_to_serializable(config=self._session.config, report=report)
        self._passed_on(index, [("report", data)])

    def _forked(self, chunks: Sequence[range], queue: int) -> Worker:
        inbox, outbox = Pipe(duplex=False)
        if pid := os.fork():
            outbox.close()
            return Worker(pid, inbox)
        code = 1
        try:
            inbox.close()
            for other in self._workers:
                other.inbox.close()
            _work(self._session, _taken(chunks, queue), outbox)
            outbox.send(("done", None))
            code = 0
        except BaseException:  # also pytest.exit in a test: the parent says it
            outbox.send(("broken", traceback.format_exc()))
        finally:
            os._exit(code)


def _taken(chunks: Sequence[range], queue: int) -> Iterator[int]:
    """Yield the indices of tests for this process, until none is left in the queue that all share."""
    while taken := os.read(queue, NUMBER.size):
        yield from chunks[NUMBER.unpack(taken)[0]]


def _work(session: pytest.Session, indices: Iterator[int], connection: Connection) -> None:
    """Run tests in a forked process."""
    random.seed()
    plugins = session.config.pluginmanager
    for name in TERMINAL:
        if plugins.has_plugin(name):
            plugins.unregister(name=name)
    # Its files, to which the descriptors 1 and 2 lead, are those of the parent.
    captured: Any = plugins.get_plugin("capturemanager")
    captured.stop_global_capturing()
    captured.start_global_capturing()
    outbox = Outbox(session.config, connection)
    plugins.register(outbox)
    index = next(indices, None)
    while index is not None:
        following = next(indices, None)
        outbox.begin(index)
        session.config.hook.pytest_runtest_protocol(
            item=session.items[index], nextitem=None if following is None else session.items[following]
        )
        outbox.end(index)
        if session.shouldfail or session.shouldstop:
            return
        index = following
