"""The plugin's settings: what is taken, and what is refused with its name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest
from tercet.vllm_plugin.start.plugin_settings import MAX_CPUS, PluginSettings, parse_settings

BAD: list[tuple[dict[str, Any], str]] = [
    ({"lease": 3}, "lease"),
    ({"lease_ttl": 0}, "lease_ttl"),
    ({"lease_ttl": "soon"}, "lease_ttl"),
    ({"max_lease_share": 1.5}, "max_lease_share"),
    ({"transport": "pigeon"}, "pigeon"),
    ({"host": "example.org"}, "host"),
    ({"host": "0.0.0.0"}, "host"),
    ({"port": "http"}, "port"),
    ({"port": 70000}, "port"),
    ({"port": "9000-8000"}, "port"),
    ({"streams": 0}, "streams"),
    ({"send_timeout": -1}, "send_timeout"),
    ({"receive_limit": -1}, "receive_limit"),
    ({"receive_limit": "fast"}, "receive_limit"),
    ({"agent_cpus": "one"}, "agent_cpus"),
    ({"agent_cpus": "3-1"}, "agent_cpus"),
    ({"agent_cpus": "-1"}, "agent_cpus"),
    ({"agent_cpus": "1-"}, "agent_cpus"),
    ({"agent_cpus": f"0-{10**12}"}, "agent_cpus"),
]

# Those that are wrong by their value, and not as a key or a type.
BAD_AS_THEY_ARE = [(extra, named) for extra, named in BAD if extra.keys() != {"lease"}]


@pytest.mark.parametrize(("extra", "named"), BAD, ids=str)
def test_a_wrong_setting_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse_settings(extra)


@pytest.mark.parametrize(("wrong", "named"), BAD_AS_THEY_ARE, ids=str)
def test_bounds_hold_on_direct_construction(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        PluginSettings(**wrong)


def test_what_is_wrong_is_said_in_plain_english() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_settings({"lease_ttl": -1})
    assert caught.value.message == "kv_connector_extra_config: lease_ttl: must be greater than 0, is -1"
    with pytest.raises(BadRequest) as caught:
        parse_settings({"lease_tll": 1})
    assert caught.value.message == "kv_connector_extra_config: unknown key lease_tll; did you mean lease_ttl?"


def test_the_limit_is_given_in_gigabytes_per_second() -> None:
    assert parse_settings({"receive_limit": 1.5}).transport_settings().receive_limit == 1.5e9


@pytest.mark.parametrize(
    ("given", "cpus"), [("", set[int]()), (3, {3}), ("3", {3}), ("0-2, 5", {0, 1, 2, 5}), ("1,1-1", {1})]
)
def test_cpus_of_the_agent(given: str | int, cpus: set[int]) -> None:
    assert parse_settings({"agent_cpus": given}).cpus() == cpus


@given(st.sets(st.integers(0, MAX_CPUS - 1), min_size=1, max_size=20))
def test_any_cpus_can_be_listed(cpus: set[int]) -> None:
    assert parse_settings({"agent_cpus": ",".join(map(str, cpus))}).cpus() == cpus


def test_an_engine_on_several_machines_needs_addresses_that_both_know() -> None:
    given = parse_settings({"host": "10.0.0.5,10.1.0.5", "secret": "a-long-secret"})
    assert (given.inner_host(1), given.inner_host(2)) == ("127.0.0.1", "10.0.0.5")
    with pytest.raises(BadRequest, match="must be this machine's address"):
        parse_settings({}).inner_host(2)
