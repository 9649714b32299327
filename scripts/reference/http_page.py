"""The page of HTTP routes, headers and error codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from scripts.reference.markdown import code, first_sentence, prose, table

from tercet.protocol import TercetError
from tercet.protocol.headers import HEADERS, PREFILLER_HEADER
from tercet.router import admin
from tercet.vllm_plugin import endpoint
from tercet_gateway import exchange
from tercet_gateway.openai_call import FAIRNESS_HEADERS, OBJECTIVE_HEADERS

HEAD = """# HTTP: routes, headers, errors

Tercet's routes. The routes of the OpenAI API are vLLM's; [the router](../router.md#openai-routes) lists those that it
serves.
"""
ERRORS = """Errors have OpenAI's form, `{"error": {"message", "type", "param", "code"}}`; `param` names the wrong field. `code` is
text, as in OpenAI's API. A router forwards vLLM's errors, such as those of its validation, with the name of the HTTP status as
code: `bad_request`, `not_found`, `internal_server_error`. Engines answer as vLLM does: the code of such errors is the status, a number.
"""


def http_page() -> str:
    """Return the page."""
    return "\n\n".join(
        [
            HEAD.strip(),
            "## Routes of a router",
            _routes(admin.routes),
            "## Routes of an engine\n\n[The verbs](../verbs.md) describes bodies and answers, as does `GET /openapi.json`.",
            _routes(endpoint.router),
            "## Headers",
            table(("header", "on", ""), ((code(each.name), each.on, each.meaning) for each in HEADERS)),
            "## Headers between Envoy and an endpoint picker",
            table(("header", ""), _of_the_gateway()),
            "## Errors",
            ERRORS.strip(),
            table(("code", "status", "type", ""), _errors()),
        ]
    )  # fmt: skip


def _of_the_gateway() -> Iterable[tuple[str, str]]:
    told = {
        exchange.DESTINATION: "Set by the picker: the endpoint, and the endpoints to try after it.",
        PREFILLER_HEADER: "Set by the picker: the endpoint that prefills, if the request needs one.",
        exchange.SUBSET: "Metadata from Envoy: the only endpoints that may be picked.",
        exchange.SERVED: "On the answer, from Envoy: the endpoint that served.",
        exchange.DROPPED: "On a refusal: the reason.",
        " or ".join(OBJECTIVE_HEADERS): "From the client: the inference objective, which has a priority.",
        " or ".join(
            FAIRNESS_HEADERS
        ): "From the client: the owner of the request; requests of one priority take turns by owner.",
    }
    return ((" or ".join(code(each) for each in names.split(" or ")), meaning) for names, meaning in told.items())


def _routes(*routers: APIRouter) -> str:
    routes = (each for router in routers for each in router.routes if isinstance(each, APIRoute))
    rows = ((code(" ".join(sorted(each.methods))), code(_path(each)), _does(each.endpoint)) for each in routes)
    return table(("method", "path", ""), rows)


def _path(route: APIRoute) -> str:
    return route.path.replace(":path}", "}")


def _does(endpoint_function: Any) -> str:
    return first_sentence(endpoint_function.__doc__)


def _errors() -> Iterable[tuple[str, str, str, str]]:
    # Errors of other modules are never sent over HTTP.
    kinds = [kind for kind in (TercetError, *TercetError.__subclasses__()) if kind.__module__ == TercetError.__module__]
    for kind in sorted(kinds, key=lambda kind: (kind.status, kind.code)):
        told = "Any other failure." if kind is TercetError else prose(kind.__doc__).replace("\n", " ")
        yield code(kind.code), str(kind.status), code(kind.__name__), told
