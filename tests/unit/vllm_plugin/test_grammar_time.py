"""A grammar that takes too long fails; one that does not is what it came to."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tercet.vllm_plugin.engine.grammar_time import within


def test_a_grammar_that_takes_too_long_fails_and_what_it_comes_to_later_is_dropped() -> None:
    compiling: Future[str] = Future()
    bounded = within(compiling, 0.01)
    with pytest.raises(TimeoutError, match="more than"):
        bounded.result(20)
    compiling.set_result("late")
    assert isinstance(bounded.exception(), TimeoutError)


@pytest.mark.parametrize("fails", [False, True])
def test_a_grammar_in_time_is_what_it_came_to(fails: bool) -> None:
    compiling: Future[str] = Future()
    bounded = within(compiling, 60)
    assert not bounded.done()
    if fails:
        compiling.set_exception(ValueError("no grammar"))
        with pytest.raises(ValueError, match="no grammar"):
            bounded.result(20)
    else:
        compiling.set_result("compiled")
        assert bounded.result(20) == "compiled"
