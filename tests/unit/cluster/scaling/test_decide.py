"""What is done when to make a fleet as large as it is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.scaling.decide import (
    Counts,
    Do,
    Drain,
    Flip,
    Present,
    ScaleCall,
    Scaling,
    Start,
    Stop,
    names_after,
    parse_counts,
)
from tercet.protocol import BadRequest, Role


def present(*names: str, busy: str = "") -> list[Present]:
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "engine": "both"}
    return [Present(name, roles[name.rpartition("-")[0]], 3 if name == busy else 0) for name in names]


def test_out_starts_all_at_once_and_drains_nothing() -> None:
    scaling = Scaling(present("prefill-0", "decode-0"), Counts(2, 3))
    assert scaling.begin() == [Start("prefill-1", "prefill"), Start("decode-1", "decode"), Start("decode-2", "decode")]
    assert scaling.state == "under_way"
    assert scaling.ready("prefill-1") == scaling.ready("decode-2") == []
    assert scaling.present == Counts(2, 2)
    assert scaling.ready("decode-1") == []
    assert (scaling.state, scaling.present) == ("done", Counts(2, 3))


def test_in_drains_the_idle_ones_and_stops_each_once_it_is_empty() -> None:
    here = present("prefill-0", "decode-0", "decode-1", "decode-2", busy="decode-2")
    scaling = Scaling(here, Counts(1, 1))
    assert scaling.begin() == [Drain("decode-1"), Drain("decode-0")]
    assert scaling.drained("decode-0") == [Stop("decode-0")]
    assert scaling.gone("decode-0") == []
    assert scaling.state == "under_way"
    assert scaling.drained("decode-1") == [Stop("decode-1")]
    assert scaling.gone("decode-1") == []
    assert (scaling.state, scaling.present) == ("done", Counts(1, 1))
    assert [each.name for each in scaling.engines] == ["prefill-0", "decode-2"]


def test_roles_change_before_anything_starts_or_ends() -> None:
    scaling = Scaling(present("prefill-0", "prefill-1", "decode-0", busy="prefill-0"), Counts(1, 2))
    assert scaling.begin() == [Flip("prefill-1", "decode")]
    assert scaling.flipped("prefill-1", "decode") == []
    assert (scaling.state, scaling.present) == ("done", Counts(1, 2))


def test_nothing_drains_before_what_starts_serves() -> None:
    scaling = Scaling(present("engine-0", "engine-1", "engine-2"), Counts(1, 0, 1))
    assert scaling.begin() == [Flip("engine-2", "prefill")]
    assert scaling.flipped("engine-2", "prefill") == [Drain("engine-1")]


def test_a_failed_start_drains_nothing_and_says_why() -> None:
    scaling = Scaling(present("prefill-0", "decode-0", "engine-0"), Counts(1, 3, 0))
    first = scaling.begin()
    assert first == [Flip("engine-0", "decode"), Start("decode-1", "decode")]
    scaling.flipped("engine-0", "decode")
    assert scaling.failed("decode-1", "no room") == []
    assert (scaling.state, scaling.present, scaling.why) == ("failed", Counts(1, 2), "decode-1: no room")


def test_an_engine_that_cannot_be_drained_serves_on() -> None:
    scaling = Scaling(present("prefill-0", "decode-0", "decode-1"), Counts(1, 1))
    assert scaling.begin() == [Drain("decode-1")]
    assert scaling.failed("decode-1", "the router does not answer") == []
    assert (scaling.state, scaling.present) == ("failed", Counts(1, 2))


def test_nothing_to_do_is_done() -> None:
    scaling = Scaling(present("prefill-0", "decode-0"), Counts(1, 1))
    assert scaling.begin() == []
    assert scaling.state == "done"


def test_names_are_not_used_again() -> None:
    assert names_after(["decode-0", "decode-4", "mine", "prefill-9"], "decode", 2) == ["decode-5", "decode-6"]
    assert names_after([], "both", 1) == ["engine-0"]


COUNTS = st.builds(Counts, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(COUNTS, COUNTS, st.randoms(use_true_random=False))
def test_every_order_of_events_ends_as_wanted_and_never_below(before: Counts, wanted: Counts, random: object) -> None:
    names = {"prefill": before.prefill, "decode": before.decode, "engine": before.both}
    here = present(*(f"{name}-{index}" for name, count in names.items() for index in range(count)))
    scaling = Scaling(here, wanted)
    least = min(len(here), wanted.prefill + wanted.decode + wanted.both)
    todo: list[Do] = scaling.begin()
    while todo:
        order = todo.pop(random.randrange(len(todo)))  # type: ignore[attr-defined]
        todo += _happens(scaling, order)
        serving = [each for each in scaling.engines if each.phase == "serving"]
        assert len(serving) >= least
    assert scaling.state == "done"
    assert scaling.present == wanted


def _happens(scaling: Scaling, order: Do) -> Sequence[Do]:
    match order:
        case Flip(name, role):
            return scaling.flipped(name, role)
        case Start(name, _):
            return scaling.ready(name)
        case Drain(name):
            return scaling.drained(name)
        case Stop(name):
            return scaling.gone(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["prefill"], "is not ROLE=NUMBER"),
        (["prefill=-1"], "is not ROLE=NUMBER"),
        (["encode=1"], "is not ROLE=NUMBER"),
        (["prefill=1", "prefill=2"], "is given twice"),
    ],
)
def test_counts_that_are_none(given: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse_counts(given)


def test_counts_leave_other_roles_as_they_are() -> None:
    assert ScaleCall(**parse_counts(["decode=5"])).counts(Counts(2, 1)) == Counts(2, 5)
    assert ScaleCall(prefill=0, decode=0).counts(Counts(1, 1, 2)) == Counts(0, 0, 2)
    for call in (ScaleCall(prefill=0), ScaleCall(decode=0), ScaleCall(prefill=0, decode=0)):
        with pytest.raises(BadRequest, match="at least one engine"):
            call.counts(Counts(1, 1))
    with pytest.raises(BadRequest, match="is empty; give numbers"):
        ScaleCall().counts(Counts(1, 1))
