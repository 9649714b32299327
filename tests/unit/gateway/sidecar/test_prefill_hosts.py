"""The allow-list: which engines a header may name, however it is written."""

from __future__ import annotations

import pytest

from tercet.protocol import BadRequest
from tercet.protocol.headers import PREFILLER_HEADER
from tercet.protocol.names import AllowedPrefillers


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ("10.0.0.0/8:8000", "10.1.2.3:8000"),
        ("10.0.0.5:8000-8010", "10.0.0.5:8010"),
        ("127.0.0.1:*", "127.0.0.1:1"),
        ("[fd00::]/8:8000", "[fd12::1]:8000"),
        ("[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
        ("*.prefill.svc:8000", "p-0.prefill.svc:8000"),
        ("*.prefill.svc:8000", "P-0.Prefill.SVC:8000"),
        ("other:1, p0:8000", " p0:8000 "),
        ("10.0.0.0/8:8000", "[::ffff:10.0.0.1]:8000"),
    ],
)
def test_allowed(patterns: str, named: str) -> None:
    (found,) = AllowedPrefillers(patterns, "prefill-hosts").named(named)
    assert found == named.strip().lower()


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ("10.0.0.0/8:8000", "11.0.0.1:8000"),
        ("10.0.0.0/8:8000", "10.0.0.1:8001"),
        ("10.0.0.0/8:8000", "10.0.0.1"),
        ("10.0.0.0/8:8000", "10.0.0.1:8000,192.168.0.1:8000"),
        ("10.0.0.0/8:8000", "ten.example:8000"),
        ("*.svc:8000", "10.0.0.1:8000"),
        ("*.svc:8000", "evil.example/x.svc:8000"),
        ("*.svc:8000", "user@p0.svc:8000"),
        ("*.svc:8000", "p0.svc:8000/path"),
        ("*:*", "2130706433:80"),
        ("*:*", "0x7f.1:80"),
        ("*:*", "0x7f000001:80"),
        ("*:*", "010.0.0.1:80"),
        ("*:*", "http://p0:80"),
        ("*:*", "p0:0"),
        ("*:*", "p0:65536"),
        ("*:*", "p0:000001" + 5000 * "1"),
        ("*:*", "p0:٣"),
        ("*:*", "p0 :80"),
        ("*:*", ""),
        ("*:*", ",,"),
        ("*:*", ",".join(f"p{number}:80" for number in range(9))),
        ("127.0.0.1:*", "[::ffff:127.0.0.2]:80"),
        ("[::]/0:80", "10.0.0.1:80"),
        ("[fe80::]/10:80", "[fe80::1%eth0]:80"),
        ("[fd00::]/8:80", "[fd00::1%a]]@[2001:db8::1]:80?[x]:80"),
        ("10.0.0.0/8:80", "[::ffff:10.0.0.1%a]]@[::ffff:192.0.2.1]:8080?[x]:80"),
    ],
)
def test_refused(patterns: str, named: str) -> None:
    with pytest.raises(BadRequest, match=PREFILLER_HEADER) as refused:
        AllowedPrefillers(patterns, "prefill-hosts").named(named)
    assert refused.value.param == PREFILLER_HEADER


def test_order_is_kept_and_nobody_is_named_twice() -> None:
    allowed = AllowedPrefillers("*:8000", "prefill-hosts")
    assert allowed.named("b:8000, a:8000,b:8000") == ["b:8000", "a:8000"]


@pytest.mark.parametrize("wrong", ["p0", "10.0.0.0/33:80", "p0:0", "p0:9-8", "p0:http", "http://p0:80", "p0:80:*"])
def test_patterns_say_a_port(wrong: str) -> None:
    with pytest.raises(BadRequest, match="prefill-hosts") as refused:
        AllowedPrefillers(wrong, "prefill-hosts")
    assert refused.value.param == "prefill-hosts"


def test_empty_allows_nobody() -> None:
    assert not AllowedPrefillers(" , ", "prefill-hosts")
