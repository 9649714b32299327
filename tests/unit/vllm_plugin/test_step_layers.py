"""Which layers a worker tells of, and when: by hooks, by full graphs that call none, and by what is between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.vllm_plugin.worker.kv_planes import NOTE_BYTES, StepLayers

LARGE = NOTE_BYTES


def test_a_step_that_runs_layer_by_layer_tells_each_when_it_is_done() -> None:
    step = StepLayers(3)
    step.begin(LARGE)
    assert [step.saved((layer,)) for layer in range(3)] == [(0,), (1,), (2,)]
    assert step.ended() == ()


def test_little_kv_goes_together_at_the_end() -> None:
    step = StepLayers(3)
    step.begin(NOTE_BYTES // 2)
    assert [step.saved((layer,)) for layer in range(3)] == [(), (0, 1), ()]
    assert step.ended() == (2,)


def test_what_a_full_graph_computed_is_told_when_its_step_ends() -> None:
    step = StepLayers(3)
    step.begin(LARGE)
    assert step.ended() == (0, 1, 2)


def test_a_step_that_pushes_nothing_tells_nothing() -> None:
    step = StepLayers(3)
    step.begin(0)
    assert step.saved((0,)) == ()
    assert step.ended() == ()


def test_after_a_step_nothing_of_it_is_left() -> None:
    step = StepLayers(2)
    step.begin(LARGE)
    step.saved((0,))
    assert step.ended() == (1,)
    assert step.ended() == ()
    step.begin(LARGE)
    assert step.ended() == (0, 1)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from((0, 1, LARGE // 3, LARGE)), st.lists(st.integers(0, 11), max_size=20))),
)
def test_each_plane_is_told_once_in_every_step_that_pushes(planes: int, steps: list[tuple[int, list[int]]]) -> None:
    """Whatever hooks run, in whatever order, also twice, or not at all (a full graph)."""
    step = StepLayers(planes)
    for plane_bytes, hooks in steps:
        step.begin(plane_bytes)
        told = [step.saved((plane,)) for plane in hooks if plane < planes]
        told.append(step.ended())
        found = [plane for some in told for plane in some]
        assert sorted(found) == (list(range(planes)) if plane_bytes else [])


@pytest.mark.parametrize("twice", [True, False])
def test_a_plane_is_never_told_before_its_hook_while_the_step_runs(twice: bool) -> None:
    step = StepLayers(3)
    step.begin(LARGE)
    assert step.saved((1,)) == (1,)
    assert step.saved((1,) if twice else (2,)) == (() if twice else (2,))
