"""Who may call an engine's verbs: refused at start where strangers could, and at each call without a key."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import msgspec
import pytest

from tercet.protocol import BadRequest, KVAddrInfo, KVLayout, RankAddress, Unauthorized
from tercet.settings import SECRET_VARIABLE, RouterConfig, decode_settings, from_environment
from tercet.settings.process_settings import API_KEY_VARIABLE
from tercet.vllm_plugin.start.plugin_settings import PluginSettings
from tercet.wire.callers import BearerKeys, bearer
from tercet.wire.serving.server_access import api_keys, callers_of, is_loopback
from tercet_gateway.gateway_settings import PickerConfig, SidecarConfig

LAYOUT = KVLayout("m", "float32", 2, 2, 8, 16, 1024, 1, "cpu")
INFO = KVAddrInfo("f" * 32, "d", 16, 40, "tcp", (RankAddress(0, ("tcp://127.0.0.1:7001",)),), LAYOUT)


@pytest.fixture(autouse=True)
def no_keys_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_VARIABLE, API_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def args(host: str | None, **given: Any) -> Namespace:
    return Namespace(**{"host": host, "api_key": None, "uds": None, **given})


# ---- at start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1"])
def test_on_loopback_an_engine_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert not callers_of(args(host), "")


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "10.1.2.3", "192.0.2.1", "no such host"])
def test_beyond_loopback_it_does_not_start_without_one_and_says_what_to_do(host: str | None) -> None:
    with pytest.raises(
        BadRequest, match=r"--host: other machines can reach .*set TERCET_SECRET to the same long random"
    ):
        callers_of(args(host), "")


def test_with_a_secret_or_vllms_key_it_starts_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callers_of(args(None), "secret")
    assert callers_of(args(None, api_key=["key"]), "")
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    assert callers_of(args(None), "")


def test_a_socket_in_a_file_system_is_nobody_elses() -> None:
    assert not callers_of(args(None, uds="/run/vllm.sock"), "")


@pytest.mark.parametrize("host", ["192.0.2.1", "127.0.0.1,192.0.2.1", "2001:db8::1"])
def test_kv_goes_to_other_machines_with_a_secret_only(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"host: other machines can reach .*set TERCET_SECRET"):
        PluginSettings(host=host).require_secret_beyond_loopback()
    PluginSettings(host=host, secret="s").require_secret_beyond_loopback()
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    PluginSettings(host=host).require_secret_beyond_loopback()


def test_kv_on_loopback_needs_none() -> None:
    PluginSettings(host="127.0.0.1,::1").require_secret_beyond_loopback()


# ---- at each call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shown",
    [
        None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic secret", "secret", "Bearer secret2", "Bearer none",
        "Bearer  secret", "Bearer secret ", "Bearer secret\n", "Bearer\tsecret", " Bearer secret",
    ],
)  # fmt: skip
def test_a_stranger_is_refused(shown: str | None) -> None:
    with pytest.raises(Unauthorized, match="no") as caught:
        BearerKeys(["secret", "key", ""]).require([] if shown is None else [shown], "no")
    assert (caught.value.status, caught.value.param) == (401, "authorization")


@pytest.mark.parametrize("shown", ["Bearer secret", "bearer key", "BEARER key"])
def test_who_shows_one_of_the_keys_may_call(shown: str) -> None:
    BearerKeys(["secret", "key"]).require([shown], "no")


@pytest.mark.parametrize(
    "shown", ["Bearer secret", "Bearer  secret", "bearer secret", "Bearer secret ", "Basic secret"]
)
def test_the_verdict_is_vllms(shown: str) -> None:
    from starlette.datastructures import Headers
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    async def app(*_: object) -> None: ...

    vllms = AuthenticationMiddleware(app, ["secret"]).verify_token(Headers({"authorization": shown}))
    try:
        BearerKeys(["secret\n"]).require([shown], "no")
    except Unauthorized:
        assert not vllms
    else:
        assert vllms


def test_two_headers_are_refused_since_servers_disagree_on_which_one_counts() -> None:
    with pytest.raises(Unauthorized, match="2 Authorization headers"):
        BearerKeys(["secret"]).require(["Bearer secret", "Bearer secret"], "no")


@pytest.mark.parametrize("blank", ["\n", " ", "\t\r\n"])
def test_a_blank_key_is_refused_at_start_wherever_it_is_given(blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"^--api-key: the key is blank"):
        callers_of(args("127.0.0.1", api_key=[blank]), "")
    with pytest.raises(BadRequest, match=r"^secret: the key is blank"):
        _ = PluginSettings(secret=blank).fleet_secret
    monkeypatch.setenv(API_KEY_VARIABLE, blank)
    with pytest.raises(BadRequest, match=f"^{API_KEY_VARIABLE}: the key is blank"):
        callers_of(args(None), "secret")
    monkeypatch.delenv(API_KEY_VARIABLE)
    monkeypatch.setenv(SECRET_VARIABLE, blank)
    with pytest.raises(BadRequest, match=f"^{SECRET_VARIABLE}: the key is blank"):
        _ = PluginSettings().fleet_secret
    for settings in (RouterConfig, SidecarConfig, PickerConfig):
        with pytest.raises(BadRequest, match=f"^{SECRET_VARIABLE}: the key is blank"):
            decode_settings(settings, from_environment(settings))


def test_a_key_without_the_end_of_its_line_is_given_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "key\n")
    assert api_keys(args(None)) == ["key"]
    assert api_keys(args(None, api_key=["other "])) == ["other"]


def test_the_end_of_a_files_line_is_no_part_of_a_key() -> None:
    BearerKeys(["secret\n"]).require([bearer("secret")["authorization"]], "no")
    BearerKeys(["secret"]).require([bearer("secret\n")["authorization"]], "no")
    assert bearer(" \n") == bearer("") == {}
    assert not BearerKeys(["\n"])


def test_where_no_key_is_set_everybody_may_call() -> None:
    BearerKeys(["", ""]).require([], "no")


# ---- what a receiver said ------------------------------------------------------------------------------------------


def test_a_sender_believes_only_what_an_engine_of_its_fleet_has_said() -> None:
    said = INFO.proved("secret")
    said.require_proof("secret")
    for changed in (
        INFO,
        INFO.proved("another"),
        msgspec.structs.replace(said, lease="e" * 32),
        msgspec.structs.replace(said, engine="x"),
        msgspec.structs.replace(said, begin=0),
        msgspec.structs.replace(said, end=41),
        msgspec.structs.replace(said, ranks=(RankAddress(0, ("tcp://192.0.2.1:7001",)),)),
        msgspec.structs.replace(said, layout=msgspec.structs.replace(LAYOUT, model="n")),
        msgspec.structs.replace(said, proof=""),
        msgspec.structs.replace(said, proof="é"),
    ):
        with pytest.raises(Unauthorized) as caught:
            changed.require_proof("secret")
        assert caught.value.param == "kv_addr_info"


def test_a_proof_outlives_the_wire() -> None:
    said = msgspec.json.encode(INFO.proved("secret"))
    msgspec.json.decode(said, type=KVAddrInfo).require_proof("secret")


def test_without_a_secret_nothing_is_proved_and_everything_believed() -> None:
    assert INFO.proved("") == INFO
    INFO.require_proof("")
    INFO.proved("secret").require_proof("")
