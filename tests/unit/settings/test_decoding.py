"""Every bound, every unknown key, and who wins: flags, variables, a file, defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from tercet.cli.store import StoreFlags
from tercet.cluster.up_config import UpConfig
from tercet.logs import EngineLog
from tercet.protocol import BadRequest
from tercet.settings import (
    EngineAddress,
    RouterConfig,
    Setting,
    Settings,
    Source,
    declared,
    decode_settings,
    encode_settings,
    from_environment,
    read_yaml,
    settings_from_parent,
)
from tercet.settings.declaration import near
from tercet.vllm_plugin.start.plugin_settings import PluginSettings
from tercet_gateway.gateway_settings import ModelRouterConfig, PickerConfig, SidecarConfig
from tercet_planner.planner_settings import PlannerConfig


class LiveRouters(Settings, frozen=True):
    count: Annotated[Annotated[int, Meta(ge=1, le=9)], Setting("How many.")] = msgspec.field(default=1, name="routers")


class House(Settings, frozen=True):
    name: Annotated[str, Setting("Its name.")]
    height_m: Annotated[Annotated[float, Meta(gt=0, lt=100)], Setting("Height.", unit="metres")] = msgspec.field(
        default=3.0, name="height"
    )
    colour: Annotated[Literal["red", "blue"], Setting("Of its walls.")] = "red"
    rates: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Setting("How often.", flag="--rate")] = ()
    rooms: Annotated[tuple[str, ...], Setting("One room; repeatable.", flag="--room")] = ()
    paint: Annotated[Mapping[str, str], Setting("What is painted how.")] = {}
    lit: Annotated[bool, Setting("Whether there is light.")] = False
    routers: LiveRouters = LiveRouters()


FLAGS = {each.key: each.flag for each in declared(House)}


def flags(**values: Any) -> Source:
    return Source({key.replace("_", "-"): value for key, value in values.items()}, names=FLAGS)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("height", "0", "--height: must be greater than 0, is 0"),
        ("height", "-1", "--height: must be greater than 0, is -1"),
        ("height", "100", "--height: must be less than 100, is 100"),
        ("height", "nan", "--height: must be greater than 0, is 'nan'"),
        ("height", "tall", "--height: must be a number, is 'tall'"),
        ("routers", "0", "--routers: must be at least 1, is 0"),
        ("routers", "10", "--routers: must be at most 9, is 10"),
        ("routers", "1.5", "--routers: must be a whole number, is 1.5"),
        ("routers", [1], "--routers: must be a whole number"),
        ("colour", "green", "--colour: must be one of blue, red, is 'green'"),
        ("lit", "maybe", "--lit: must be true or false, is 'maybe'"),
        ("paint", 3, "--paint: must be a mapping of keys to values, is 3"),
        ("name", ["a"], "--name: must be text"),
        ("rates", ["-1"], "--rate: must be greater than 0, is -1"),
        ("rates", ["2", "-1"], "--rate[1]: must be greater than 0, is -1"),
    ],
)
def test_every_complaint_names_the_setting_the_bound_and_the_value(key: str, value: Any, told: str) -> None:
    with pytest.raises(BadRequest) as raised:
        decode_settings(House, flags(**{"name": "n", key: value}))
    assert raised.value.message == told
    assert raised.value.param == key


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "n", "height_m": -1.0}, "height: must be greater than 0, is -1.0"),
        ({"name": "n", "colour": "green"}, "colour: must be one of blue, red, is 'green'"),
        ({"name": 3}, "name: must be text, is 3"),
    ],
)
def test_bounds_hold_on_direct_construction_too(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest) as raised:
        House(**fields)
    assert raised.value.message == told
    with pytest.raises(BadRequest, match="routers: must be at least 1, is 0"):
        LiveRouters(count=0)


@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers())
def test_direct_construction_and_decoding_agree(height: float) -> None:
    def height_of(make: Any) -> Any:
        try:
            return make().height_m
        except BadRequest as error:
            return error.message

    assert height_of(lambda: House(name="n", height_m=height)) == height_of(
        lambda: decode_settings(House, Source({"name": "n", "height": height}))
    )


@given(st.text(min_size=1))
def test_every_unknown_key_is_refused_by_name(key: str) -> None:
    if key in FLAGS:
        return
    with pytest.raises(BadRequest) as raised:
        decode_settings(House, Source({"name": "n", key: 1}, "there: "))
    assert raised.value.message.startswith(f"there: unknown key {key}; ")


def test_the_nearest_key_is_offered() -> None:
    with pytest.raises(BadRequest, match=r"unknown key colors; did you mean colour?"):
        decode_settings(House, Source({"name": "n", "colors": "red"}))
    with pytest.raises(BadRequest, match=r"unknown key height_m; did you mean height?"):
        decode_settings(House, Source({"name": "n", "height_m": 1}))
    with pytest.raises(
        BadRequest, match=r"unknown key zzz; the keys are name, height, colour, rates, rooms, paint, lit, routers"
    ):
        decode_settings(House, Source({"name": "n", "zzz": 1}))


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--rate", "--request-rate"), ("--engine_restart", "--engine-restarts"), ("--request_rate", "--request-rate")],
)
def test_one_whose_word_it_is_comes_before_one_that_is_spelt_a_little_like_it(given: str, meant: str) -> None:
    assert near(given, ["--temperature", "--engine-restarts", "--request-rate"]) == f"did you mean {meant}?"


def test_what_is_needed_is_said() -> None:
    with pytest.raises(BadRequest, match="name: is required"):
        decode_settings(House, Source({}))


levels = st.sampled_from([None, "1", "2", "3", "4"])


@given(levels, levels, levels)
def test_flags_win_over_variables_and_these_over_a_file(flag: str | None, env: str | None, file: str | None) -> None:
    found = decode_settings(
        House,
        flags(**{} if flag is None else {"routers": flag}),
        from_environment(House, {} if env is None else {"TERCET_ROUTERS": env}),
        Source({"name": "n"} | ({} if file is None else {"routers": file}), origin="--config f: "),
    )
    assert found.routers.count == int(flag or env or file or 1)


def test_each_source_calls_a_setting_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_text("name: n\nheight: 0\n")
    with pytest.raises(BadRequest, match=r"--config \S*h.yaml: height: must be greater than 0, is 0"):
        decode_settings(House, read_yaml(tmp_path / "h.yaml"))
    with pytest.raises(BadRequest, match="TERCET_HEIGHT: must be greater than 0, is -2"):
        decode_settings(House, from_environment(House, {"TERCET_NAME": "n", "TERCET_HEIGHT": "-2"}))


class Served(Settings, frozen=True):
    port: Annotated[Annotated[int, Meta(ge=1, le=65535)], Setting("Where it is.")] = 8000
    metrics_port: Annotated[Annotated[int, Meta(ge=1, le=65535)], Setting("Where they are.")] = 9090


def test_where_kubernetes_says_that_a_service_is_is_no_port() -> None:
    link = {"TERCET_PORT": "tcp://10.96.0.7:8000", "TERCET_METRICS_PORT": "udp://[fd00::1]:53"}
    assert decode_settings(Served, from_environment(Served, link)) == Served()
    assert decode_settings(Served, from_environment(Served, {**link, "TERCET_PORT": "81"})).port == 81
    with pytest.raises(BadRequest, match=r"TERCET_PORT: .*'tcp://8000'"):
        decode_settings(Served, from_environment(Served, {"TERCET_PORT": "tcp://8000"}))


def test_lists_and_mappings_of_every_source(tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_text("name: 12\nrooms: hall\npaint: {router: 7, lit: true}\nlit: true\n")
    found = decode_settings(House, read_yaml(tmp_path / "h.yaml"))
    assert found == House(name="12", rooms=("hall",), paint={"router": "7", "lit": "true"}, lit=True)
    variables = {"TERCET_NAME": "n", "TERCET_ROOMS": "hall 'my room'", "TERCET_PAINT": "router=red lit='a b'"}
    found = decode_settings(House, from_environment(House, variables))
    assert (found.rooms, found.paint) == (("hall", "my room"), {"router": "red", "lit": "a b"})
    with pytest.raises(BadRequest, match="TERCET_PAINT: 'red' is not KEY=VALUE"):
        from_environment(House, {"TERCET_PAINT": "red"})


@pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", "a: 1\na: 2\n", "\xff"])
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "h.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(BadRequest, match=r"--config \S*h.yaml: "):
        read_yaml(tmp_path / "h.yaml")
    with pytest.raises(BadRequest, match=r"--config \S*none.yaml: "):
        read_yaml(tmp_path / "none.yaml")


houses = st.builds(
    House,
    name=st.text(),
    height_m=st.floats(min_value=0.001, max_value=99),
    colour=st.sampled_from(["red", "blue"]),
    rooms=st.lists(st.text()).map(tuple),
    paint=st.dictionaries(st.text(), st.text()),
    lit=st.booleans(),
    routers=st.builds(LiveRouters, count=st.integers(1, 9)),
)


@given(houses)
def test_what_is_written_is_read_again(house: House) -> None:
    written = msgspec.json.decode(msgspec.json.encode(encode_settings(house)))
    assert decode_settings(House, Source(written)) == house


def test_a_child_reads_what_its_parent_has_encoded(tmp_path: Path) -> None:
    house = House(name="n", height_m=3.5, colour="blue", rooms=("a", "b"), paint={"a": "b"})
    file = tmp_path / "house.json"
    file.write_bytes(msgspec.json.encode(encode_settings(house)))
    assert settings_from_parent(House, file) == house


def test_engines_as_text_and_as_mappings() -> None:
    text = "http://h:1/,role=decode,label.zone=a"
    found = decode_settings(RouterConfig, Source({"engines": [text, {"url": "http://h:2", "name": "b"}]}))
    assert [(e.name, e.url, e.role, e.labels) for e in found.engines] == [
        ("engine-0", "http://h:1", "decode", {"zone": "a"}),
        ("b", "http://h:2", "both", {}),
    ]
    with pytest.raises(BadRequest, match=r"engines\[0\]: unknown key rolle; did you mean role?"):
        decode_settings(RouterConfig, Source({"engines": [{"url": "http://h:2", "rolle": "b"}]}))
    with pytest.raises(BadRequest, match="engines: two engines are called b"):
        decode_settings(RouterConfig, Source({"engines": [{"url": "http://h:2", "name": "b"}, "http://h:1,name=b"]}))


@pytest.mark.parametrize(("given", "why"), [("inf", "at most 1000000000"), ("nan", "greater than 0")])
def test_seconds_are_a_number_that_json_can_say(given: str, why: str) -> None:
    engines = (EngineAddress("e", "http://e"),)
    with pytest.raises(BadRequest, match=f"request-timeout: must be {why}"):
        RouterConfig(engines=engines, request_timeout_s=float(given))


# The number of settings: what operators have no use for is a constant.

OF_PROCESSES = (
    RouterConfig, UpConfig, PluginSettings, EngineLog, PickerConfig, SidecarConfig, ModelRouterConfig, PlannerConfig,
)  # fmt: skip


def test_processes_have_at_most_150_settings() -> None:
    """Counted is each name once, of all settings that a long-running process reads from flags, variables or files.

    `tercet store` has flags only, no variables and no file: 7 of their names are no name of a setting, and not counted.
    """
    names = {each.key.replace("_", "-") for kind in OF_PROCESSES for each in declared(kind)}
    assert len(names) <= 150
    of_store = {each.name.replace("_", "-") for each in fields(StoreFlags)}
    assert len(of_store) <= 11
    assert len(of_store - names) <= 7


def test_a_field_without_a_description_is_a_constant() -> None:
    assert "wait-for-engine" not in {each.key for each in declared(RouterConfig)}
    assert RouterConfig(await_engines=True, wait_for_engine_s=1.0).wait_for_engine_s == 1.0
