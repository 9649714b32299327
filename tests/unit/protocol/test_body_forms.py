"""What a body is by its header fields: a table, and for any fields that the layer behind reads nothing else."""

from __future__ import annotations

from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest, TercetError, UnsupportedMediaType
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
