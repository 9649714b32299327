"""What a pod is for a fleet, and what members become of pods."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.fleet.discovery import FoundEngine, engines_of, roles_of, with_found
from tercet.fleet.kubernetes_api import Pod
from tercet.fleet.members import MemberState
from tercet.protocol import BadRequest
from tercet.settings import EngineAddress

from .api_server import Object, pod


def as_pod(given: Object) -> Pod:
    return msgspec.convert(given, Pod)


def engines(*pods: Object) -> list[FoundEngine]:
    return [each for given in pods for each in engines_of(as_pod(given), (8000,))]


@pytest.mark.parametrize(
    ("labels", "annotations", "role"),
    [
        ({}, {}, "both"),
        ({"llm-d.ai/role": "prefill"}, {}, "prefill"),
        ({"llm-d.ai/role": "decode"}, {}, "decode"),
        ({"llm-d.ai/role": "prefill-decode"}, {}, "both"),
        ({"llm-d.ai/role": "encode-prefill"}, {}, "prefill"),
        ({"llm-d.ai/role": "decode", "tercet/role": "prefill"}, {}, "prefill"),
        ({}, {"tercet/role": "decode"}, "decode"),
    ],
)
def test_roles(labels: dict[str, str], annotations: dict[str, str], role: str) -> None:
    (found,) = engines(pod("a", labels=labels, annotations=annotations))
    assert (found.address.role, found.serves, found.withheld) == (role, True, "")
    assert found.address.labels == {"app": "engine", **labels}


def test_addresses() -> None:
    assert engines(pod("a"))[0].address.url == "http://10.0.0.1:8000"
    assert engines(pod("a", "fd00::7"))[0].address.url == "http://[fd00::7]:8000"
    assert engines(pod("a", annotations={"tercet/port": "9000"}))[0].address.url == "http://10.0.0.1:9000"
    (one, two) = engines_of(as_pod(pod("a")), (8000, 8001), "https")
    assert (one.address.name, one.address.url) == ("a-rank-0", "https://10.0.0.1:8000")
    assert (two.address.name, two.address.url) == ("a-rank-1", "https://10.0.0.1:8001")


def test_pods_that_are_no_engines() -> None:
    assert engines(pod("a", ip="")) == []
    assert engines(pod("a", phase="Succeeded"), pod("b", phase="Failed")) == []
    with pytest.raises(BadRequest, match="not a role that generates"):
        engines(pod("a", labels={"llm-d.ai/role": "encode"}))
    for port in ("0", "65536", "http", "8000,", "\uff18", 5000 * "1"):
        with pytest.raises(BadRequest, match="is not a port"):
            engines(pod("a", annotations={"tercet/port": port}))


def test_why_a_pod_gets_nothing_new() -> None:
    found = engines(
        pod("a", deleting=True), pod("b", ready=False), pod("c", annotations={"tercet/drain": "true"}), pod("d")
    )
    assert [(each.serves, each.withheld) for each in found] == [
        (False, "its pod is being deleted"),
        (False, "its pod is not ready"),
        (True, "its pod is marked tercet/drain"),
        (True, ""),
    ]


# ---- members -----------------------------------------------------------------------------------------------------


def names(members: tuple[MemberState, ...]) -> dict[str, bool]:
    return {each.address.name: each.leaving for each in members}


def test_a_pod_joins_when_it_is_ready_and_stays_until_it_is_gone() -> None:
    assert with_found((), engines(pod("a", ready=False))) == ()
    assert with_found((), engines(pod("a", deleting=True))) == ()
    members = with_found((), engines(pod("a"), pod("b", "10.0.0.2")))
    assert names(members) == {"a": False, "b": False}
    members = with_found(members, engines(pod("a", ready=False), pod("b", "10.0.0.2", deleting=True)))
    assert names(members) == {"a": True, "b": True}
    assert [each.withheld for each in members] == ["its pod is not ready", "its pod is being deleted"]
    members = with_found(members, engines(pod("a")))
    assert names(members) == {"a": False}


def test_a_successor_of_the_same_name_is_another_one() -> None:
    members = with_found((), engines(pod("a", uid="one")))
    assert with_found(members, engines(pod("a", "10.0.0.9", uid="two", ready=False))) == ()
    (after,) = with_found(members, engines(pod("a", "10.0.0.9", uid="two")))
    assert (after.uid, after.address.url) == ("two", "http://10.0.0.9:8000")


def test_an_address_that_was_given_to_another_pod_is_that_ones() -> None:
    members = with_found((), engines(pod("z-old")))
    after = with_found(members, engines(pod("z-old", deleting=True), pod("new")))
    assert names(after) == {"new": False}
    after = with_found(members, engines(pod("a-old", deleting=True), pod("new")))
    assert names(after) == {"new": False}


def test_those_that_somebody_named_stay_as_they_are() -> None:
    named = MemberState(EngineAddress("a", "http://10.0.0.1:8000/"), draining=True)
    found = engines(pod("a", "10.0.0.5"), pod("b", "10.0.0.1"), pod("c", "10.0.0.3"))
    assert with_found((named,), found)[0] is named
    assert names(with_found((named,), found)) == {"a": True, "c": False}
    assert with_found(with_found((named,), found), ()) == (named,)


def test_what_an_operator_decides_holds_until_the_pod_says_otherwise() -> None:
    found = engines(pod("a", labels={"tercet/role": "prefill"}))
    (member,) = with_found((), found)
    changed = msgspec.structs.replace(
        member, draining=True, address=msgspec.structs.replace(member.address, role="both")
    )
    (after,) = with_found((changed,), found, roles_of(found))
    assert (after.address.role, after.draining, after.leaving) == ("both", True, True)
    (after,) = with_found((changed,), engines(pod("a", labels={"tercet/role": "decode"})), roles_of(found))
    assert (after.address.role, after.draining) == ("decode", True)


PODS = st.lists(
    st.builds(
        lambda name, uid, ip, ready, deleting: pod(name, f"10.0.0.{ip}", uid=uid, ready=ready, deleting=deleting),
        st.sampled_from("abcd"), st.sampled_from(["one", "two"]), st.integers(1, 5), st.booleans(), st.booleans(),
    ),
    unique_by=lambda each: each["metadata"]["name"],
)  # fmt: skip


@given(st.lists(PODS, min_size=1, max_size=6))
def test_those_that_are_picked_are_the_ready_pods(history: list[list[Object]]) -> None:
    members: tuple[MemberState, ...] = ()
    for pods in history:
        before, members = members, with_found(members, engines(*pods))
        assert with_found(members, engines(*pods)) == members, "once is enough"
        assert len({each.address.url for each in members}) == len(members)
        existing = {each["metadata"]["uid"] + each["metadata"]["name"] for each in pods}
        assert {each.uid + each.address.name for each in members} <= existing, "who is gone is no member"
        ready = [each for each in engines(*pods) if each.serves]
        assert {each.address.url for each in members if not each.leaving} == {each.address.url for each in ready}
        known = {each.uid + each.address.name for each in before}
        leaving = {each.uid + each.address.name for each in members if each.leaving}
        assert leaving <= known, "nobody joins to leave"
