"""Validation of bodies by vLLM's models: the same bodies are accepted as without bounds, and wrong ones cost little."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.exceptions import VLLMError

from tercet.router.openai.body_models import body_adapters, bound_invocations, bound_routes, bounded_validator
from tercet.router.openai.openai_server import import_vllm, server_args
from tercet_checks.chaos.adversary import ListField, list_fields
from tests.own_metrics import own_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ITEMS = 120
MOST_ERRORS = 100
TASKS = "generate", "render"
RANDOM = re.compile("[0-9a-f]{8,}(-[0-9a-f]{4,})*")
WRONG = object()


class Validators(NamedTuple):
    """The validators of one route's body."""

    former: Any
    bounded: Any


class Bodies(NamedTuple):
    """The validators by route, and the lists of all routes."""

    validators: dict[str, Validators]
    lists: list[ListField]


def application() -> FastAPI:
    """Return vLLM's application with all routes that a router may have."""
    import_vllm()
    from vllm.entrypoints.launchers.app import build_app

    with own_metrics():  # one of the layers that vLLM builds here registers them
        return build_app(server_args("m", ["m"], "127.0.0.1", 0, 512, ()), TASKS, None)


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    app = application()
    # Some routes have the same bodies as others.
    adapters = {each.path: each.adapter for each in {each.kind: each for each in [*body_adapters(app)][::-1]}.values()}
    named, definitions = TypeAdapter.json_schemas(
        [(path, "validation", adapter) for path, adapter in adapters.items()], ref_template="#/$defs/{model}"
    )
    paths = {
        path: {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
        for (path, _), schema in named.items()
    }
    former = {path: adapter.validator for path, adapter in adapters.items()}
    bound_routes(app)
    validators = {path: Validators(former[path], adapter.validator) for path, adapter in adapters.items()}
    return Bodies(validators, list(list_fields({**definitions, "paths": paths})))


def validated(validator: Any, body: Any) -> Any:
    """Return what a validator makes of a body; :data:`WRONG` if it refuses it."""
    try:
        return plain(validator.validate_python(body, from_attributes=True))
    except (ValidationError, VLLMError, ValueError, TypeError):
        return WRONG


def plain(found: Any) -> Any:
    """Return a value that can be compared: without random ids, and with all items validated."""
    if isinstance(found, BaseModel):
        return type(found), plain(dict(found))
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [plain(each) for each in found]
    if hasattr(found, "__next__"):
        try:
            return [plain(each) for each in found]
        except ValidationError:
            return WRONG
    return RANDOM.sub("", str(found)) if isinstance(found, str) else (type(found), repr(found))


def errors(validator: Any, body: Any) -> int:
    try:
        validator.validate_python(body, from_attributes=True)
    except ValidationError as error:
        return error.error_count()
    except (VLLMError, ValueError, TypeError):
        return 1
    return 0


def test_the_lists_of_all_routes_are_found(bodies: Bodies) -> None:
    found = {(each.route, each.field) for each in bodies.lists}
    for route, field in [
        ("/v1/responses", "input"), ("/v1/responses", "input.content"), ("/v1/responses", "tools"),
        ("/v1/chat/completions", "messages"), ("/v1/chat/completions", "messages.content"),
        ("/v1/chat/completions", "messages.tool_calls"), ("/v1/chat/completions", "tools"),
        ("/v1/chat/completions", "stop"), ("/v1/chat/completions", "logit_bias"),
        ("/v1/chat/completions/batch", "messages"), ("/v1/completions", "prompt"), ("/v1/messages", "messages.content"),
        ("/v1/messages", "tools"), ("/tokenize", "messages"), ("/detokenize", "tokens"),
        ("/inference/v1/generate", "token_ids"),
    ]:  # fmt: skip
        assert (route, field) in found


def test_a_refused_body_has_few_errors_for_each_list_of_each_route(bodies: Bodies) -> None:
    counts = {
        (each.route, each.field, repr(item)): errors(bodies.validators[each.route].bounded, each.filled([item] * ITEMS))
        for each in bodies.lists
        for item in each.wrong
    }
    assert {place: count for place, count in counts.items() if count > MOST_ERRORS} == {}
    assert sum(count > 0 for count in counts.values()) > len(counts) / 2


def test_an_item_is_accepted_and_read_as_without_bounds(bodies: Bodies) -> None:
    accepted = 0
    for each in bodies.lists:
        former, bounded = bodies.validators[each.route]
        for item in (*each.examples, *each.wrong):
            body = each.filled([item])
            expected = validated(former, body)
            assert validated(bounded, body) == expected, (each.route, each.field, item)
            accepted += expected is not WRONG
    assert accepted > 500


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mixed_items_are_accepted_and_read_as_without_bounds(bodies: Bodies, data: st.DataObject) -> None:
    each = data.draw(st.sampled_from(bodies.lists))
    known = st.sampled_from((*each.examples, *each.wrong))
    objects = [item for item in (*each.examples, *each.wrong) if isinstance(item, dict)]
    merged = st.lists(st.sampled_from(objects), max_size=3).map(
        lambda parts: {k: v for part in parts for k, v in part.items()}
    )
    body = each.filled(data.draw(st.lists(known | merged, max_size=4)))
    former, bounded = bodies.validators[each.route]
    assert validated(bounded, body) == validated(former, body)


def test_an_error_says_which_types_an_item_may_have(bodies: Bodies) -> None:
    for item in ({"type": "zzz"}, {}, {"type": 1}):
        with pytest.raises(ValidationError) as error:
            bodies.validators["/v1/responses"].bounded.validate_python({"input": "x", "tools": [item]})
        assert "function, " in error.value.errors()[0]["msg"]
        assert error.value.errors()[0]["loc"][:2] == ("tools", 0)


def test_models_of_invocations_are_bounded_before_their_adapters_are_made(bodies: Bodies) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    bound_invocations(("generate",), None)
    for kind in (ChatCompletionRequest, CompletionRequest):
        body = {"model": "m", "messages": [1] * ITEMS, "prompt": [{}] * ITEMS}
        assert 0 < errors(TypeAdapter(kind), body) <= MOST_ERRORS


def test_a_schema_that_is_not_built_yet_has_no_bounded_validator() -> None:
    assert bounded_validator(object()) is None
