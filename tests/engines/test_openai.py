"""The OpenAI API of the router, request by request beside that of a lone engine: the same status, the same answer.

The router's program is `disaggregated`, so that each answer has crossed from one engine to another where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from tokenizers import Tokenizer

from tests.small_llama import small_llama

from .client_streams import said_by
from .conftest import Fleet, router_over
from .prompts import prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("OpenAI's and Anthropic's API")]

# Different for each request or server, and not part of the answer.
VOLATILE = {
    "id", "created", "created_at", "completed_at", "system_fingerprint", "kv_transfer_params", "request_id", "item_id",
    "call_id", "tool_call_id", "metrics", "root", "permission",
}  # fmt: skip
TEXT = "The sea is wide and the wind is cold, and the old sailor tells the children of the ships he saw. "
PROMPT = TEXT * 4
QUESTION = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": TEXT * 3 + "What is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
# Without `strict`, vLLM takes any JSON for a call's arguments.
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA, "strict": True},
}
BASE: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 12}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several prompts": {"prompt": [PROMPT, TEXT * 2]},
    "token ids": {"prompt": prompt_of(200), "return_token_ids": True},
    "several choices": {"n": 3, "temperature": 0.8, "seed": 11},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 3},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True, "max_tokens": 4},
    "echo with logprobs": {"echo": True, "logprobs": 2, "max_tokens": 4},
    "echo only": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "prompt logprobs": {"prompt_logprobs": 2, "max_tokens": 2},
    "stop": {"stop": ["is not said", "facebook"], "max_tokens": 40},
    "stop included": {"stop": [" zo"], "include_stop_str_in_output": True, "max_tokens": 40},
    "stop tokens": {"stop_token_ids": list(range(3600, 3700)), "max_tokens": 40},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "max_tokens": 20},
    "logit bias": {"logit_bias": {"1000": 100}, "max_tokens": 3},
    "allowed tokens": {"allowed_token_ids": [1000, 2000, 3000]},
    "bad words": {"bad_words": ["reasonably"]},
    "at least": {"min_tokens": 10, "stop_token_ids": list(range(2000))},
    "ignoring the end": {"ignore_eos": True},
    "truncated": {"truncate_prompt_tokens": 20},
    "regex": {"structured_outputs": {"regex": "[a-c]{4}"}},
    "choice": {"structured_outputs": {"choice": ["yes indeed", "no"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "ab" | "cd"'}},
    "beams": {"use_beam_search": True, "n": 2, "max_tokens": 5},
    "one token": {"max_tokens": 1},
}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "at most": {"max_completion_tokens": 5},
    "several choices": {"n": 2, "temperature": 0.8, "seed": 11},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": " ", "max_tokens": 30},
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}, "max_tokens": 40,
    },
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "named tool": {
        "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "paint"}}, "max_tokens": 60,
    },
    "required tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80},
    "tools, none wanted": {"tools": [TOOL], "tool_choice": "none"},
    "tools, no parser": {"tools": [TOOL], "tool_choice": "auto"},
    "going on": {
        "messages": [*QUESTION, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True, "add_generation_prompt": False, "echo": True,
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
}  # fmt: skip
REFUSED: dict[str, tuple[str, Any]] = {
    "unknown model": ("/v1/completions", {**BASE, "model": "another", "prompt": "x"}),
    "unknown model, chat": ("/v1/chat/completions", {**BASE, "model": "another", "messages": QUESTION}),
    "prompt too long": ("/v1/completions", {**BASE, "prompt": [7] * 5000}),
    "empty prompt": ("/v1/completions", {**BASE, "prompt": []}),
    "no prompt": ("/v1/completions", BASE),
    "no messages": ("/v1/chat/completions", {**BASE, "messages": []}),
    "token id too high": ("/v1/completions", {**BASE, "prompt": [10**6]}),
    "temperature": ("/v1/completions", {**BASE, "prompt": "x", "temperature": -1}),
    "top_p": ("/v1/completions", {**BASE, "prompt": "x", "top_p": 2}),
    "n": ("/v1/completions", {**BASE, "prompt": "x", "n": 0}),
    "max_tokens": ("/v1/completions", {**BASE, "prompt": "x", "max_tokens": -1}),
    "type of a field": ("/v1/completions", {**BASE, "prompt": "x", "max_tokens": "many"}),
    "too many logprobs": ("/v1/completions", {**BASE, "prompt": "x", "logprobs": 100}),
    "suffix": ("/v1/completions", {**BASE, "prompt": "x", "suffix": "y"}),
    "regex": ("/v1/completions", {**BASE, "prompt": "x", "structured_outputs": {"regex": "("}}),
    "schema": (
        "/v1/chat/completions",
        {**BASE, "messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ),
    "allowed tokens": ("/v1/completions", {**BASE, "prompt": "x", "allowed_token_ids": []}),
    "image": (
        "/v1/chat/completions",
        {
            **BASE,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
            ],
        },
    ),
    "embeddings": ("/v1/embeddings", {"model": "smollm2", "input": "x"}),
    "rerank": ("/v1/rerank", {"model": "smollm2", "query": "x", "documents": ["y"]}),
    "transcriptions": ("/v1/audio/transcriptions", {"model": "smollm2"}),
    "no such route": ("/v1/nothing", {}),
    "no JSON": ("/v1/completions", b"{nonsense"),
}


async def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    """Status and parsed answer, of a stream all its events."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{path}", data=data, headers={"content-type": "application/json"}) as response,
    ):
        text = await response.text()
        if response.content_type != "text/event-stream":
            return response.status, msgspec.json.decode(text)
        assert text.endswith("data: [DONE]\n\n") or path == "/v1/responses", text
        return response.status, said_by(text)


async def both(fleet: Fleet, path: str, body: Any, router: str | None = None) -> tuple[Any, Any]:
    """The router's answer and the engine's, with the same status and without what is different each time."""
    (status, ours), (expected, theirs) = [
        await post(url, path, body) for url in (router or fleet.url, fleet.engine_url("prefill"))
    ]
    assert status == expected, (ours, theirs)
    return lasting(ours), lasting(named(theirs))


def named(answer: Any) -> Any:
    """An engine's answer as it is but for an error's code: a name here, as OpenAI's are, and the status there."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return answer
    names = {400: "bad_request", 403: "forbidden", 404: "unknown_model" if error["param"] == "model" else "not_found"}
    return {"error": {**error, "code": names[error["code"]]}}


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [lasting(item) for item in value]
    # Two engines computed what one did here: in float32 the last digits of a log probability may differ.
    return pytest.approx(value, abs=2e-3) if isinstance(value, float) else value


def joined(events: list[Any]) -> Any:
    """What a stream says in all: each choice's text, finish reason and log probabilities, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "reason": None})
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                whole["text"] += call["function"].get("name") or call["function"].get("arguments") or ""
            logprobs = choice.get("logprobs") or {}
            whole["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            whole["reason"] = choice["finish_reason"] or whole["reason"]
    return choices, usage


@pytest.mark.parametrize("case", COMPLETIONS)
async def test_completions(fleet: Fleet, case: str) -> None:
    ours, theirs = await both(fleet, "/v1/completions", {**BASE, "prompt": PROMPT, **COMPLETIONS[case]})
    assert ours == theirs
    if case.startswith("stop"):
        assert ours["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("case", CHATS)
async def test_chat_completions(fleet: Fleet, case: str) -> None:
    ours, theirs = await both(fleet, "/v1/chat/completions", {**BASE, "messages": QUESTION, **CHATS[case]})
    assert ours == theirs


@pytest.fixture(scope="module")
def of_vllms_own_path(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another router over the same engines, without the fast path, whose vLLM layer parses tool calls."""
    flags = ("--fast-path", "off", "--program-arg", "min_send=1", "--", "--enable-auto-tool-choice")
    flags += ("--tool-call-parser", "hermes")
    with router_over(fleet.engine_urls(), tmp_path_factory.mktemp("of_vllms_own_path"), *flags) as url:
        yield url


@pytest.fixture(params=["fast path", "vLLM's own path"])
def router(request: pytest.FixtureRequest, fleet: Fleet) -> str:
    return fleet.url if request.param == "fast path" else request.getfixturevalue("of_vllms_own_path")


@pytest.mark.parametrize("case", ["greedy", "several choices", "logprobs", "stop", "echo", "several prompts", "regex"])
async def test_streamed_completions(fleet: Fleet, router: str, case: str) -> None:
    body = {**BASE, "prompt": PROMPT, **COMPLETIONS[case], "stream": True, "stream_options": {"include_usage": True}}
    ours, theirs = await both(fleet, "/v1/completions", body, router)
    assert joined(ours) == joined(theirs)
    assert ours[-1]["usage"] == theirs[-1]["usage"]


@pytest.mark.parametrize("case", ["greedy", "several choices", "logprobs", "stop", "json schema"])
async def test_streamed_chat_completions(fleet: Fleet, router: str, case: str) -> None:
    body = {**BASE, "messages": QUESTION, **CHATS[case], "stream": True, "stream_options": {"include_usage": True}}
    ours, theirs = await both(fleet, "/v1/chat/completions", body, router)
    assert joined(ours) == joined(theirs)
    assert ours[-1]["usage"] == theirs[-1]["usage"]


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": TEXT * 2},
    "instructions": {"input": QUESTION[1:], "instructions": "Be brief."},
    "json schema": {
        "input": TEXT,
        "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}},
        "max_output_tokens": 40,
    },
    "unknown model": {"input": TEXT, "model": "another"},
    "unknown predecessor": {"input": TEXT, "previous_response_id": "resp_nothing"},
}


@pytest.mark.parametrize("case", RESPONSES)
async def test_responses(fleet: Fleet, case: str) -> None:
    body = {"model": "smollm2", "temperature": 0, "max_output_tokens": 12, "store": False, **RESPONSES[case]}
    ours, theirs = await both(fleet, "/v1/responses", body)
    assert ours == theirs


async def test_streamed_responses(fleet: Fleet) -> None:
    body = {"model": "smollm2", "input": TEXT * 2, "temperature": 0, "max_output_tokens": 12, "stream": True}
    ours, theirs = await both(fleet, "/v1/responses", body)
    for events in (ours, theirs):
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
    text = [
        "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") for events in (ours, theirs)
    ]
    assert text[0] == text[1] != ""
    assert ours[-1]["response"]["usage"] == theirs[-1]["response"]["usage"]


async def test_anthropic_messages(fleet: Fleet) -> None:
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 12, "messages": QUESTION[1:]}
    ours, theirs = await both(fleet, "/v1/messages", body)
    assert ours == theirs


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": QUESTION, "return_token_strs": True}),
        ("/detokenize", {"tokens": [100, 200, 300]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/v1/chat/completions/render", {"messages": QUESTION}),
    ],
    ids=["tokenize", "tokenize-chat", "detokenize", "detokenize-nothing", "render"],
)
async def test_without_an_engine(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    ours, theirs = await both(fleet, path, {"model": "smollm2", **body})
    assert ours == theirs or refuse_the_path(ours, theirs)


def refuse_the_path(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both say that this vLLM has no such route: Tercet does so in OpenAI's form, too."""
    return theirs == {"detail": "Not Found"} and ours["error"]["code"] == "unknown_path"


@pytest.mark.parametrize("case", REFUSED)
async def test_refusals(fleet: Fleet, case: str) -> None:
    path, body = REFUSED[case]
    ours, theirs = await both(fleet, path, body)
    if refuse_the_path(ours, theirs):
        return
    if case == "no JSON":  # one reader of bodies says so, for every route and process
        assert ours["error"]["code"] == theirs["error"]["code"] == "bad_request"
        assert "is not JSON" in ours["error"]["message"]
        return
    assert ours == theirs
    assert "message" in ours.get("error", ours) or "detail" in ours


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
async def test_tool_calls(of_vllms_own_path: str, choice: str, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "paint"}}
    tokenizer = Tokenizer.from_file(str(small_llama() / "tokenizer.json"))
    # JSON may have any number of spaces and an array any number of items, and the model likes both.
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    bias = {str(token): -100 for token, text in texts.items() if text.isspace() or "," in text}
    # vLLM 0.31 allows further calls with `parallel_tool_calls` false, and drops all of them if the last one is cut.
    bias[str(msgspec.json.decode((small_llama() / "config.json").read_bytes())["eos_token_id"])] = 100
    fields: dict[str, Any] = {
        "model": "smollm2", "temperature": 0, "max_tokens": 100, "messages": QUESTION, "tools": [TOOL],
        "tool_choice": named if choice == "named" else choice, "stream": stream,
        "logit_bias": bias, "parallel_tool_calls": False,
    }  # fmt: skip
    status, answer = await post(of_vllms_own_path, "/v1/chat/completions", fields)
    assert status == 200, answer
    if stream:
        calls = [call for event in answer for c in event["choices"] for call in c["delta"].get("tool_calls") or ()]
        name = next(call["function"]["name"] for call in calls if call["function"].get("name"))
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    else:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert name == "paint"
    painted = msgspec.json.decode(arguments)
    assert painted["colour"] in ("red", "blue")
    assert 0 <= painted["count"] <= 9


async def test_the_openai_client_knows_the_errors(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="another"):
            await client.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError, match="context length"):
            await client.completions.create(model="smollm2", prompt=[7] * 5000)
        listed = await client.models.list()
    async with openai.AsyncOpenAI(base_url=f"{fleet.engine_url('prefill')}/v1", api_key="none") as client:
        expected = await client.models.list()
    assert [(m.id, m.max_model_len) for m in listed.data] == [(m.id, m.max_model_len) for m in expected.data]  # type: ignore[attr-defined]
