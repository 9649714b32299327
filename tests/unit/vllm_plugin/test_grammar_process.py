"""The process in which grammars are tried: each way in which a try ends, and nothing of it remains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tercet.vllm_plugin.core import grammar_process
from tercet.vllm_plugin.core.grammar_process import NO_TEXT, TOO_SLOW, GrammarProcess, TryJob, TryOutcome
from tests.longest_wait import LONGEST_WAIT_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.vllm, pytest.mark.slow]


class Grammar:
    """A grammar whose text says what it does."""

    def __init__(self, text: str) -> None:
        self.text = text

    def fill_bitmask(self, mask: Any, at: int) -> None:
        mask[at] = 0 if self.text == "nothing" else -1

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self.text in ("slow", "often long"):
            _spin(0.07 if self.text == "slow" else 0.15)
        return True

    def is_terminated(self) -> bool:
        return self.text == "short"


def _spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def _compiled(manager: Any, backend: str, kind: Any, text: str) -> Grammar:
    assert backend == "xgrammar"  # vLLM 0.33 refuses any other one than the manager's
    match text:
        case "spin":
            _spin(1000)
        case "eat":
            bytearray(2 * grammar_process.MEMORY)
        case "wrong":
            raise ValueError("no such rule")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.abort()
        case "stand still":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            pass
    return Grammar(text)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarProcess]:
    tokenizer = SimpleNamespace(encode=lambda text, **_: [ord(letter) for letter in text])
    backend = SimpleNamespace(allocate_token_bitmask=lambda count: torch.zeros(count, 8, dtype=torch.int32))
    manager = SimpleNamespace(tokenizer=tokenizer, backend=backend)

    def managers(name: str, _: Any) -> Any:
        if name == "missing":
            raise ValueError("no such backend")
        return manager

    monkeypatch.setattr(grammar_process, "_manager", managers)
    monkeypatch.setattr(grammar_process, "_compiled", _compiled)
    monkeypatch.setattr(grammar_process, "STALL_SECONDS", LONGEST_WAIT_S)
    made = GrammarProcess(None)
    made.fork()
    try:
        yield made
    finally:
        made.close()


def attempt(process: GrammarProcess, text: str, limit: float = 30.0) -> tuple[TryOutcome, str]:
    return process.attempt("xgrammar", TryJob("REGEX", text, limit, 0))


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    ("text", "outcome", "why"),
    [
        ("fine", TryOutcome.FINE, ""), ("short", TryOutcome.FINE, ""), ("nothing", TryOutcome.REFUSED, NO_TEXT),
        ("slow", TryOutcome.REFUSED, TOO_SLOW), ("often long", TryOutcome.REFUSED, TOO_SLOW),
        ("wrong", TryOutcome.REFUSED, "cannot be compiled: no such rule"),
        ("eat", TryOutcome.REFUSED, "takes too much memory to compile"), ("spin", TryOutcome.OVER_LIMIT, ""),
        ("die", TryOutcome.OVER_LIMIT, ""), ("crash", TryOutcome.OVER_LIMIT, ""), ("stand still", TryOutcome.LOST, ""),
    ],
)  # fmt: skip
def test_each_end_of_a_try(
    process: GrammarProcess, text: str, outcome: TryOutcome, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if text == "stand still":
            patch.setattr(grammar_process, "STALL_SECONDS", 2.0)
        assert attempt(process, text, 0.5 if text == "spin" else 30.0) == (outcome, why)
    assert attempt(process, "fine") == (TryOutcome.FINE, "")
    (only,) = [each for each in children() if each.pid == process.pid]
    wait_until(lambda: all(each.status() == psutil.STATUS_ZOMBIE for each in only.children()))


def test_without_a_backend_nothing_is_fine(process: GrammarProcess) -> None:
    assert process.attempt("missing", TryJob("REGEX", "fine", 30.0, 0)) == (TryOutcome.LOST, "")


def test_it_keeps_no_descriptor_of_the_core(process: GrammarProcess) -> None:
    assert attempt(process, "fine") == (TryOutcome.FINE, "")
    assert process.pid is not None
    assert psutil.Process(process.pid).num_fds() <= 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_has_ended_or_stands_still_is_started_again(
    process: GrammarProcess, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "START_SECONDS", 2.0 if number == signal.SIGSTOP else LONGEST_WAIT_S)
    monkeypatch.setattr(GrammarProcess, "_spawn", GrammarProcess.fork)
    assert process.pid is not None
    first = psutil.Process(process.pid)
    first.send_signal(number)
    assert attempt(process, "fine") == (TryOutcome.LOST, "")
    monkeypatch.setattr(grammar_process, "START_SECONDS", LONGEST_WAIT_S)
    assert attempt(process, "fine") == (TryOutcome.FINE, "")
    assert process.pid != first.pid
    assert not first.is_running()


def test_it_ends_with_the_core(process: GrammarProcess) -> None:
    core = os.fork()
    if not core:
        inner = GrammarProcess(None)
        inner.fork()
        attempt(inner, "fine")
        while True:
            signal.pause()
    wait_until(lambda: psutil.Process(core).children())
    below = psutil.Process(core).children()
    os.kill(core, signal.SIGKILL)
    os.waitpid(core, 0)
    psutil.wait_procs(below, LONGEST_WAIT_S)
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
