"""What a body is by its header fields, and names that clients choose: bounded where they enter, different, and their
clients' own.
"""

from __future__ import annotations

from email.message import Message
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.scheduling.scorers import session_of
from tercet.decisions.sessions import FIELDS, HEADERS, session_in_body, session_named
from tercet.protocol import BadRequest, Request, TercetError, UnsupportedMediaType
from tercet.protocol.errors import LONGEST_MESSAGE
from tercet.protocol.names import LONGEST_ID, LONGEST_KEPT, kept_name, owned_name, sequence_id
from tercet.protocol.request_checks import MULTIPART, VERB_FORMS, Labelled, announces_body, forms_of, labelled
from tercet.protocol.wire import JSON, MSGPACK

Pairs = list[tuple[bytes, bytes]]
TYPE, ENCODING = b"content-type", b"content-encoding"
IS_JSON = (TYPE, JSON.encode())
FORM = b'multipart/form-data; boundary="a, b"'


@pytest.mark.parametrize(
    "fields",
    [
        [(TYPE, b"application/json")],
        [(TYPE, b"\t Application/JSON ;charset=utf-8")],
        [(TYPE, b'application/json; a="x, text/plain; \\", y"')],
        [(TYPE, b"application/json,"), (TYPE, b",application/json;charset=latin-1")],
        [(b"Content-Type", b"application/json"), (b"CONTENT-TYPE", b"application/json")],
        [IS_JSON, (ENCODING, b"")],
        [IS_JSON, (ENCODING, b"Identity , ,"), (ENCODING, b"identity")],
        [IS_JSON, (b"content-length", b"5"), (b"content-length", b"5")],
        [IS_JSON, (b"transfer-encoding", b"Chunked"), (b"host", b"a"), (b"host", b"a")],
    ],
)
def test_json_has_many_spellings_and_one_meaning(fields: Pairs) -> None:
    found = labelled([(b"x-a", b"1"), *fields, (b"X-B", b"\xff")], (JSON,))
    assert found.form == JSON
    assert [value for name, value in found.fields if name.lower() == TYPE] == [b"application/json"]
    assert not [value for name, value in found.fields if name.lower() == ENCODING]
    assert (found.fields[0], found.fields[-1]) == ((b"x-a", b"1"), (b"X-B", b"\xff"))
    assert labelled(found.fields, (JSON,)).fields == found.fields


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ([(TYPE, b"text/plain")], 415, "content-type"),
        ([(TYPE, b"text/json")], 415, "content-type"),
        ([(TYPE, b"application/x-www-form-urlencoded")], 415, "content-type"),
        ([(TYPE, b"application/problem+json")], 415, "content-type"),
        ([(TYPE, b"application / json")], 415, "content-type"),
        ([(TYPE, b'"application/json"')], 415, "content-type"),
        ([(TYPE, b"application/json\xa0")], 415, "content-type"),
        ([(TYPE, b"application/json text/plain")], 415, "content-type"),
        ([(TYPE, b"; application/json")], 415, "content-type"),
        ([(TYPE, FORM)], 415, "content-type"),
        ([(TYPE, b"application/json, text/plain")], 400, "content-type"),
        ([(TYPE, b'x/y; a="b, application/json')], 415, "content-type"),
        ([IS_JSON, (TYPE, b"text/plain")], 400, "content-type"),
        ([(TYPE, b"text/plain"), IS_JSON], 400, "content-type"),
        ([IS_JSON, (ENCODING, b"gzip")], 415, "content-encoding"),
        ([IS_JSON, (ENCODING, b"DEFLATE")], 415, "content-encoding"),
        ([IS_JSON, (ENCODING, b"identity, gzip")], 415, "content-encoding"),
        ([IS_JSON, (ENCODING, b"no-such-encoding")], 415, "content-encoding"),
        ([IS_JSON, (ENCODING, b"gzip"), (ENCODING, b"gzip")], 415, "content-encoding"),
        ([IS_JSON, (ENCODING, b"identity"), (ENCODING, b"gzip")], 400, "content-encoding"),
        ([IS_JSON, (b"content-length", b"5"), (b"content-length", b"6")], 400, "content-length"),
        ([IS_JSON, (b"content-length", b"5"), (b"transfer-encoding", b"chunked")], 400, "transfer-encoding"),
        ([IS_JSON, (b"transfer-encoding", b"gzip, chunked")], 415, "transfer-encoding"),
        ([IS_JSON, (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")], 400, "transfer-encoding"),
        ([IS_JSON, (b"host", b"a"), (b"Host", b"b")], 400, "host"),
    ],
)
def test_what_is_not_read_or_has_two_meanings_is_refused_by_the_fields_name(
    fields: Pairs, status: int, param: str
) -> None:
    with pytest.raises((BadRequest, UnsupportedMediaType)) as refused:
        labelled(fields, (JSON,))
    assert (refused.value.status, refused.value.param) == (status, param)
    assert refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("fields", [[], [(TYPE, b"")], [(TYPE, b" , "), (TYPE, b"")]])
def test_without_a_type_it_is_the_routes_and_none_is_made_up(fields: Pairs) -> None:
    """A page can make a browser send a body without a type to another origin, and FastAPI reads none such as JSON."""
    found = labelled(fields, VERB_FORMS)
    assert (found.form, found.content_type, found.fields) == (JSON, "", [(TYPE, b"")] if fields else [])


def test_a_form_with_files_keeps_its_boundary() -> None:
    found = labelled([(TYPE, FORM.replace(b"multipart", b"MultiPart")), (TYPE, FORM)], (MULTIPART,))
    assert (found.form, found.fields) == (MULTIPART, [(TYPE, FORM)])
    with pytest.raises(BadRequest):
        labelled([(TYPE, FORM), (TYPE, b"multipart/form-data; boundary=b")], (MULTIPART,))
    with pytest.raises(UnsupportedMediaType):
        labelled([IS_JSON], (MULTIPART,))


def test_each_route_has_its_forms() -> None:
    assert forms_of("/v1/audio/transcriptions") == forms_of("/v1/audio/translations") == (MULTIPART, JSON)
    assert forms_of("/v1/completions") == forms_of("/nowhere") == (JSON,)
    assert labelled([(TYPE, b"application/MsgPack")], VERB_FORMS).form == MSGPACK


@pytest.mark.parametrize(
    ("fields", "announces"),
    [([], False), ([(b"content-length", b"0")], False), ([(b"Content-Length", b"1")], True),
     ([(b"Transfer-Encoding", b"chunked")], True), ([(b"content-length", b"0"), (b"content-length", b"2")], True)],
)  # fmt: skip
def test_a_body_is_announced(fields: Pairs, announces: bool) -> None:
    assert announces_body(fields) == announces


def decided(fields: Pairs, forms: tuple[str, ...]) -> Labelled | TercetError:
    try:
        return labelled(fields, forms)
    except TercetError as refusal:
        return refusal


def fastapi_reads_json(fields: Pairs) -> bool:
    """What FastAPI does: it reads the first field, by Python's parser of mail."""
    said = next((value.decode("latin-1") for name, value in fields if name.lower() == TYPE), "")
    message = Message()
    message["content-type"] = said
    subtype = message.get_content_subtype()
    return bool(said) and message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )  # fmt: skip


PIECES = st.sampled_from(
    ["application/json", "APPLICATION/JSON", "text/plain", "application/a+json", "multipart/form-data", "text/json",
     ",", ";", " ", "\t", '"', "\\", "charset=utf-8", "\xa0", "\x0b", "/", "+json",
     "identity", "gzip", "deflate", "chunked"]
)  # fmt: skip
VALUES = st.lists(PIECES, max_size=4).map(lambda pieces: "".join(pieces).encode("latin-1"))
NAMES = st.sampled_from([b"content-type", b"Content-Type", b"content-encoding", b"x-other", b"transfer-encoding"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4), st.sampled_from([(JSON,), (MULTIPART,), VERB_FORMS]))
def test_whatever_the_fields_the_layer_behind_reads_what_was_decided(fields: Pairs, forms: tuple[str, ...]) -> None:
    found = decided(fields, forms)
    if isinstance(found, TercetError):
        assert found.status in (400, 415)
        assert found.param in {name.decode().lower() for name, _ in fields}
        return
    assert found.form in forms
    assert fastapi_reads_json(found.fields) == (found.content_type == JSON)
    assert found.form in (found.content_type.partition(";")[0], forms[0])
    assert [name.lower() for name, _ in found.fields].count(TYPE) <= 1
    assert ENCODING not in {name.lower() for name, _ in found.fields}
    assert labelled(found.fields, forms) == found


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
