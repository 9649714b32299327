"""Names that clients choose are bounded where they enter, stay different, and belong to their clients."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.scheduling.scorers import session_of
from tercet.decisions.sessions import FIELDS, HEADERS, session_in_body, session_named
from tercet.protocol import BadRequest, Request
from tercet.protocol.errors import LONGEST_MESSAGE
from tercet.protocol.names import LONGEST_ID, LONGEST_KEPT, kept_name, owned_name, sequence_id

LONG = "n" * 4_000_000
MOST_BYTES = 1024


@given(st.text(max_size=400))
def test_a_kept_name_is_short_and_can_be_printed_and_kept_again(name: str) -> None:
    kept = kept_name(name)
    assert len(kept) <= LONGEST_KEPT
    assert kept.isprintable()
    assert kept_name(kept) == kept
    if len(name) <= LONGEST_KEPT and name.isprintable():
        assert kept == name


@given(st.text(min_size=1, max_size=3), st.text(min_size=1, max_size=3))
def test_long_names_that_differ_stay_different(one: str, other: str) -> None:
    assert (kept_name(LONG[:5000] + one) == kept_name(LONG[:5000] + other)) == (one == other)


def test_a_long_name_is_recognised_by_its_beginning() -> None:
    assert kept_name(f"run-42:{LONG}").startswith("run-42:nnn")
    assert kept_name("é" * 500 + "\ud83d").isascii()
    assert len(sequence_id(LONG)) <= LONGEST_ID


def by_key(name: str, key: str) -> str:
    return owned_name(name, {"authorization": f"Bearer {key}"} if key else {})


def test_equal_names_of_clients_with_different_keys_are_different() -> None:
    names = {by_key(name, key) for name in ("s", "t", LONG) for key in ("", "one", "two")}
    assert len(names) == 9
    assert all(len(name) < MOST_BYTES for name in names)
    assert by_key("s", "") == "s"
    assert owned_name("s", {"authorization": "bearer one"}) == by_key("s", "one")
    assert not any("one" in name or "two" in name for name in names)


def named_by(path: tuple[str, ...], name: str) -> Any:
    body: Any = name
    for part in reversed(path):
        body = {part: body}
    return body


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("key", ["", "sk-secret"])
def test_every_form_of_a_session_in_a_body_is_bounded_and_owned(path: tuple[str, ...], key: str) -> None:
    session = session_in_body(named_by(path, LONG))
    assert session is not None
    assert len(session) < MOST_BYTES
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = Request(seq_id="s", prompt=(1,), session=session, headers=headers)
    assert session_named(request) == session_of(request, ["x-session-token"]) == by_key(LONG, key)


@pytest.mark.parametrize("header", HEADERS)
def test_every_form_of_a_session_in_a_header_is_bounded_and_owned(header: str) -> None:
    mine, theirs = (
        session_named(Request(seq_id="s", prompt=(1,), headers={header: LONG, "authorization": f"Bearer {key}"}))
        for key in ("one", "two")
    )
    assert mine is not None
    assert theirs is not None
    assert mine != theirs
    assert len(mine) < MOST_BYTES


def test_an_error_that_quotes_a_client_is_bounded() -> None:
    error = BadRequest(f"model: {LONG}", "model")
    assert len(error.message) <= LONGEST_MESSAGE + 3
    assert len(str(error)) <= LONGEST_MESSAGE + 3
