"""Keys, sizes and places, over ASGI: what is refused, how, and that each place comes back."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from tercet.fleet import RunningSequence
from tercet.fleet.admission import Gate
from tercet.logs import request_id
from tercet.protocol import Request
from tercet.router import router_app
from tercet.router.observe.metrics import Metrics
from tercet.router.request_bodies import asked_by
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import RequestRun
from tercet.settings import Limits, RetryBudget
from tercet.wire.serving.answers import wants_trace
from tercet.wire.serving.server_access import Asked, current
from tests.longest_wait import LONGEST_WAIT_S, until

from .conftest import LiveRouter, counted

PATH = "/v1/completions"


class App:
    """Reads the body and answers when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[bytes] = []
        self.asked: list[Asked] = []
        self.headers: list[Mapping[str, str]] = []
        self.order: list[int] = []
        self.running = 0
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        try:
            body, more = b"", scope["method"] == "POST"
            while more:
                message = await receive()
                body += message["body"]
                more = message["more_body"]
            self.bodies.append(body)
            self.asked.append(current().asked)
            self.headers.append(current().headers)
            await self.go.wait()
            if self.fails:
                raise RuntimeError("the application failed")
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        finally:
            self.running -= 1


class House:
    """An application behind the router."""

    def __init__(
        self, router: LiveRouter, metrics: Metrics, limits: Limits, keys: tuple[str, ...] = (), size: int = 1000
    ):
        self.app = App()
        self.gate = Gate(limits, router.fleet, metrics)
        self.front = RouterApp(self.app, None, self.gate, keys, router.service.program_called, size)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.front), base_url="http://localhost")

    async def post(self, path: str = PATH, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def fill(self, count: int, **body: Any) -> list[asyncio.Task[httpx.Response]]:
        """So many requests that do not end before ``go``."""
        self.app.go.clear()
        return [await self.one(**body) for _ in range(count)]

    async def one(self, **body: Any) -> asyncio.Task[httpx.Response]:
        task = asyncio.create_task(self.post(**body))
        for _ in range(30):
            await asyncio.sleep(0)
        return task

    @property
    def is_empty(self) -> bool:
        admission = self.gate._admission
        return (admission.in_flight, admission.waiting, self.gate._woken) == (0, [], {})


@pytest.fixture
async def house(router: LiveRouter, metrics: Metrics) -> AsyncIterator[House]:
    house = House(router, metrics, Limits(in_flight=2, queued=2, queue_timeout_s=5.0))
    yield house
    assert house.is_empty
    assert counted("tercet_requests_in_flight") == counted("tercet_requests_queued") == 0


async def test_what_is_not_limited_passes(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits())
    tasks = await house.fill(50, prompt="x")
    assert house.app.running == 50
    house.app.go.set()
    assert {(await task).status_code for task in tasks} == {200}


async def test_bodies_of_running_requests_have_a_bound_in_bytes(
    router: LiveRouter, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_app, "ADMITTED_BYTES", 50_000)
    house = House(router, metrics, Limits(), size=10_000)
    tasks = await house.fill(5, prompt="x" * 9_900)
    refused = await house.post(prompt="x" * 9_900)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
    assert "would exceed the limit of 50000" in refused.json()["error"]["message"]
    assert counted("tercet_requests_refused_total", reason="bodies_full") == 1
    small = await house.one(prompt="x")
    assert house.app.running == 6, "what fits passes"
    house.app.go.set()
    assert {(await task).status_code for task in [*tasks, small]} == {200}
    assert house.front._admitted.size == 0
    assert (await house.post(prompt="x" * 9_900)).status_code == 200


@pytest.mark.parametrize("how", ["the client leaves", "the application fails"])
async def test_the_bytes_of_a_request_that_breaks_off_are_free_again(
    router: LiveRouter, metrics: Metrics, how: str
) -> None:
    house = House(router, metrics, Limits())
    (task,) = await house.fill(1, prompt="x" * 900)
    assert house.front._admitted.size > 900
    if how == "the client leaves":
        task.cancel()
    house.app.fails = True
    house.app.go.set()
    await asyncio.gather(task, return_exceptions=True)
    assert house.front._admitted.size == 0


async def test_the_application_gets_the_body_and_what_it_asks_for(house: House) -> None:
    await house.post(model="m", priority=-2, user="ann", prompt="hello")
    assert json.loads(house.app.bodies[0]) == {"model": "m", "priority": -2, "user": "ann", "prompt": "hello"}
    assert house.app.asked == [Asked("m", -2, "ann")]


async def test_a_body_that_closes_its_session_is_the_last_one_of_it(house: House) -> None:
    for action in ("open", "close"):
        await house.post(model="m", nvext={"session_control": {"session_id": "s", "action": action}})
    assert [headers.get("x-dynamo-session-final") for headers in house.app.headers] == [None, "true"]
    assert house.app.asked == [Asked("m", session_name="s")] * 2


async def test_a_body_may_name_a_session_as_clients_of_dynamo_do(house: House) -> None:
    await house.post(model="m", nvext={"agent_context": {"session_id": "s"}}, session_name="no field of a body")
    assert house.app.asked == [Asked("m", session_name="s")]


@pytest.mark.parametrize("content", [b"", b'{"model": 7}', b'{"priority": "high"}', b"[1]"])
async def test_a_body_that_vllm_will_refuse_is_vllms_to_refuse(house: House, content: bytes) -> None:
    assert (await house.client.post(PATH, content=content)).status_code == 200
    assert house.app.bodies == [content]
    assert house.app.asked == [Asked()]


async def test_a_field_of_another_type_hides_no_other_field(house: House) -> None:
    await house.post(model="m", user=5, priority="high")
    assert house.app.asked == [Asked("m")]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
async def test_rules_and_vllm_see_the_same_in_every_encoding(house: House, encoding: str) -> None:
    content = json.dumps({"model": "m", "priority": 3, "user": "ann", "prompt": "x"}).encode(encoding)
    await house.client.post(PATH, content=content, headers={"content-type": "application/json; charset=utf-16"})
    assert house.app.asked == [Asked("m", 3, "ann")]
    assert json.loads(house.app.bodies[0].decode("utf-8"))["prompt"] == "x"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/cohere/v2/chat"])
@pytest.mark.parametrize(
    ("content", "field"),
    [(b"no json", None), (b'"\xff"', None), (b'{"user": "\\ud83d"}', "user"),
     (b'{"request_id": "\\ud83d"}', "request_id"),
     (b'{"messages": [{"content": "\xed\xa0\xbd"}]}', "messages[0].content"), (b'{"top_p": NaN}', "top_p")],
)  # fmt: skip
async def test_a_body_that_cannot_be_read_is_refused_in_the_apis_form(
    house: House, path: str, content: bytes, field: str | None
) -> None:
    answer = await house.client.post(path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, house.app.bodies) == (400, [])
    said = answer.json()
    assert (field or "JSON") in (said if path.startswith("/cohere") else said["error"])["message"]
    if path == "/v1/messages":
        assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    elif not path.startswith("/cohere"):
        assert (said["error"]["param"], said["error"]["code"]) == (field, "bad_request")


async def test_what_is_no_json_by_its_type_is_refused(house: House) -> None:
    answer = await house.client.post(PATH, content=b"\xff\xfe", headers={"content-type": "image/png"})
    assert (answer.status_code, answer.json()["error"]["param"], house.app.bodies) == (415, "content-type", [])


# ---- places --------------------------------------------------------------------------------------------------


async def test_a_saturated_fleet_answers_429_in_openais_words(house: House) -> None:
    tasks = await house.fill(4)
    assert (house.app.running, counted("tercet_requests_queued")) == (2, 2)
    answer = await house.post()
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("Saturated", "saturated", None)
    assert "queue of 2" in error["message"]
    assert counted("tercet_requests_refused_total", reason="queue_full") == 1
    house.app.go.set()
    assert [(await task).status_code for task in tasks] == [200] * 4
    assert counted("tercet_queue_seconds_count") == 2


@pytest.mark.parametrize("allowed", ["http://browser", "http://other"])
async def test_a_browser_may_read_a_refusal_as_it_may_read_an_answer(
    router: LiveRouter, metrics: Metrics, allowed: str
) -> None:
    from tercet.router.server import with_cors

    args = Namespace(allowed_origins=[allowed], allow_credentials=False, allowed_methods=["*"], allowed_headers=["*"])
    gate = Gate(Limits(), router.fleet, metrics)
    front = RouterApp(App(), None, gate, ("k",), router.service.program_called, 1000, lambda app: with_cors(app, args))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://localhost") as client:
        answer = await client.post(PATH, json={}, headers={"origin": "http://browser"})
    assert answer.status_code == 401
    assert answer.headers.get("access-control-allow-origin") == ("http://browser" if "browser" in allowed else None)


async def test_who_waits_too_long_is_sent_away(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(in_flight=1, queue_timeout_s=0.05))
    inside, waiting = await house.fill(2)
    answer = await waiting
    assert answer.status_code == 429
    assert "0.05 s" in answer.json()["error"]["message"]
    assert counted("tercet_requests_refused_total", reason="queue_timeout") == 1
    house.app.go.set()
    assert (await inside).status_code == 200
    assert house.is_empty


async def test_priorities_decide_who_is_next(house: House) -> None:
    inside = await house.fill(2)
    late, early = await house.one(priority=3, prompt="late"), await house.one(priority=-3, prompt="early")
    displaced = await house.one(priority=0, prompt="between")
    assert (await late).status_code == 429  # it ranked last when the queue was full
    house.app.go.set()
    for task in (*inside, early, displaced):
        assert (await task).status_code == 200
    assert [json.loads(body).get("prompt") for body in house.app.bodies] == [None, None, "early", "between"]


async def test_routes_of_the_fleet_and_methods_without_a_body_need_no_place(house: House) -> None:
    tasks = await house.fill(4)
    for path in ("/v1/models", "/tercet/v1/engines"):
        asking = asyncio.create_task(house.client.get(path))
        tasks.append(asking)
    tasks.append(asyncio.create_task(house.post("/tercet/v1/programs/check")))
    for _ in range(30):
        await asyncio.sleep(0)
    assert house.app.running == 5
    house.app.go.set()
    assert {(await task).status_code for task in tasks} == {200}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions/render"])
async def test_routes_that_do_not_generate_take_a_place_too(house: House, path: str) -> None:
    """They are work of this process, and not of engines: what is full of engines' work does not keep them out."""
    tasks = await house.fill(2)
    waiting = asyncio.create_task(house.post(path))
    for _ in range(30):
        await asyncio.sleep(0)
    assert house.app.running == 2
    house.app.go.set()
    assert {(await task).status_code for task in (*tasks, waiting)} == {200}


async def test_engines_that_are_full_keep_only_out_who_is_for_engines(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(tokens=1, queued=0))
    router.fleet.member("d").in_flight_tokens = 1
    assert (await house.post()).status_code == 429
    assert (await house.post("/tokenize")).status_code == 200


# ---- bodies that do not end ------------------------------------------------------------------------------------------


class Sender:
    """A client that sends a body in pieces; ``sent`` is what it was answered."""

    def __init__(self, front: RouterApp, path: str, method: str = "POST", key: str | None = None) -> None:
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        self.received = 0
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope: Any = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        self.task = asyncio.create_task(front(scope, self._receive, self._send))

    def send(self, size: int, ends: bool = False) -> None:
        self.pieces.put_nowait(
            {"type": "http.request", "body": (b"0" if ends else b" ").rjust(size), "more_body": not ends}
        )

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    async def _receive(self) -> Any:
        message = await self.pieces.get()
        self.received += len(message["body"])
        return message

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/health", "/ping", "/live", "/load", "/version", "/metrics", PATH, "/tokenize"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"])
async def test_without_the_key_no_byte_of_a_body_is_taken(
    router: LiveRouter, metrics: Metrics, path: str, method: str
) -> None:
    house = House(router, metrics, Limits(), keys=("key",))
    sender = Sender(house.front, path, method)
    sender.send(900)
    async with asyncio.timeout(LONGEST_WAIT_S):
        await sender.task
    assert sender.received == 0
    assert sender.status == (401 if path in (PATH, "/tokenize") else 200)
    assert house.app.bodies in ([], [b""])


async def test_the_largest_of_many_unfinished_bodies_is_let_go(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(), size=1000)
    senders = [Sender(house.front, PATH) for _ in range(5)]
    for number, sender in enumerate(senders):
        sender.send(900 + number)
    await settle()
    *others, gone = senders
    assert [sender.task.done() for sender in senders] == [False, False, False, False, True]
    assert gone.status == 429
    assert (await house.post()).status_code == 200
    for sender in others:
        sender.send(1, ends=True)
    await asyncio.gather(*(sender.task for sender in senders))
    assert [sender.status for sender in others] == [200] * 4
    assert (house.front._bodies.size, len(house.front._bodies)) == (0, 0)


async def test_a_failing_application_gives_its_place_back(house: House) -> None:
    house.app.fails = True
    for _ in range(5):
        answer = await house.post(path="/v1/messages")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")
    assert (await house.post()).json()["error"]["code"] == "router_failed"


async def test_a_fleet_that_grows_lets_those_in_who_wait(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(in_flight_per_engine=1))
    _, waiting = tasks = await house.fill(2)
    assert house.app.running == 1  # of both engines only one decodes
    router.fleet.member("p").role = "both"
    await until(lambda: house.app.running >= 2)
    house.app.go.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert waiting.done()
    assert house.is_empty


async def test_tokens_on_engines_count(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(tokens=100, queued=0))
    router.fleet.member("d").in_flight_tokens = 99
    assert (await house.post()).status_code == 200
    router.fleet.member("d").in_flight_tokens = 100
    assert (await house.post()).status_code == 429


@pytest.mark.parametrize("waiting", [False, True])
async def test_cancelled_at_every_step(house: House, waiting: bool) -> None:
    others = await house.fill(2 if waiting else 0)
    for turns in range(40):
        task = asyncio.create_task(house.post())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert house.gate._admission.in_flight == len(others)
        assert house.gate._admission.waiting == []
    house.app.go.set()
    await asyncio.gather(*others)


async def test_a_client_that_leaves_while_it_waits_gives_up_its_turn(house: House) -> None:
    others = await house.fill(2)
    sent: list[Any] = []
    left = asyncio.Event()
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
    waiting = asyncio.create_task(house.front(scope, receive, send))  # type: ignore[arg-type]
    for _ in range(30):
        await asyncio.sleep(0)
    assert len(house.gate._admission.waiting) == 1
    left.set()
    await waiting
    assert (sent, house.gate._admission.waiting) == ([], [])
    assert counted("tercet_requests_refused_total", reason="client_left") == 1
    house.app.go.set()
    await asyncio.gather(*others)


async def test_after_a_wait_the_application_still_learns_that_its_client_left(house: House) -> None:
    others = await house.fill(2)
    left, seen = asyncio.Event(), []
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    front = RouterApp(app, None, house.gate, (), lambda _: None, 1000)
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
    running = asyncio.create_task(front(scope, receive, None))  # type: ignore[arg-type]
    for _ in range(30):
        await asyncio.sleep(0)
    house.app.go.set()
    await asyncio.gather(*others)
    left.set()
    await running
    assert seen == ["http.request", "http.disconnect"]


# ---- probes --------------------------------------------------------------------------------------------------


async def test_it_lives_without_engines_but_is_not_ready(house: House, router: LiveRouter) -> None:
    async def status(path: str) -> int:
        return (await house.client.get(path)).status_code

    assert (await status("/live"), await status("/health")) == (200, 200)
    for member in router.fleet.members:
        member.reachable = False
    assert (await status("/live"), await status("/health"), await status("/ping")) == (200, 503, 503)
    router.fleet.members[0].reachable = True
    assert await status("/health") == 200
    router.fleet.drain(router.fleet.members[0].name)
    assert await status("/health") == 503


# ---- sizes and keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(house: House, announced: bool, method: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    answer = await house.client.request(method, PATH, content=b"x" * 1001 if announced else chunks())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "1000 bytes" in answer.json()["error"]["message"]
    assert house.app.bodies == []
    whole = b'"' + b"x" * 998 + b'"'
    assert (await house.client.request(method, PATH, content=whole)).status_code == 200


@pytest.mark.parametrize("shown", [None, "Bearer wrong", "Basic key", "Bearer", "key"])
@pytest.mark.parametrize("path", [PATH, "/tokenize", "/invocations", "/tercet/v1/engines", "/openapi.json"])
async def test_without_the_key_nothing_is_done(
    router: LiveRouter, metrics: Metrics, path: str, shown: str | None
) -> None:
    house = House(router, metrics, Limits(in_flight=1), keys=("key", "other"))
    headers = {} if shown is None else {"authorization": shown}
    answer = await house.post(path, headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert house.app.bodies == []


@pytest.mark.parametrize("shown", ["Bearer key", "bearer other"])
async def test_each_key_opens(router: LiveRouter, metrics: Metrics, shown: str) -> None:
    house = House(router, metrics, Limits(), keys=("key", "other"))
    assert (await house.post(headers={"authorization": shown})).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
async def test_probes_and_metrics_need_no_key(router: LiveRouter, metrics: Metrics, path: str) -> None:
    house = House(router, metrics, Limits(), keys=("key",))
    assert (await house.client.get(path)).status_code == 200
    assert (await house.client.options(PATH)).status_code == 200


def test_what_vllm_takes_keeps_its_priority() -> None:
    asked = asked_by({"model": None, "priority": "9", "stream": True})
    assert (asked.model, asked.priority, asked.stream) == (None, 9, True)


# ---- what it says of requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["yes", "", "2"])
async def test_a_trace_is_wanted_or_not(house: House, said: str) -> None:
    answer = await house.post(headers={"x-tercet-trace": said})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-tercet-trace"


@pytest.mark.parametrize(
    ("said", "wanted"), [("1", True), ("true", True), (" True ", True), ("0", False), ("false", False)]
)
def test_a_trace_is_asked_for_in_more_than_one_word(said: str, wanted: bool) -> None:
    assert wants_trace({"x-tercet-trace": said}) == wanted
    assert not wants_trace({})


async def test_each_request_is_logged_with_what_became_of_it(
    router: LiveRouter, metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(router, metrics, Limits())
    monkeypatch.setattr(house.front, "_access_log", True)
    caplog.set_level("INFO", "tercet.access")
    await house.post()
    await house.post(headers={"x-tercet-program": "nonsense"})
    await house.client.get("/live")
    house.app.fails = True
    await house.post(path="/v1/models?key=private")
    fields = [getattr(record, "tercet_fields") for record in caplog.records if record.name == "tercet.access"]  # noqa: B009
    assert [(each["method"], each["path"], each["status"]) for each in fields] == [
        ("POST", PATH, 200), ("POST", PATH, 400), ("GET", "/live", 200), ("POST", "/v1/models", 500),
    ]  # fmt: skip
    assert caplog.messages[0].startswith(f"POST {PATH} 200 in 0.")


async def test_the_access_log_names_request_model_and_tokens(
    router: LiveRouter, metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        context = current()
        for name in ("cmpl-1-0", "cmpl-1-1"):
            request = Request(seq_id=name, prompt=(1, 2, 3), sampling_params={"max_tokens": 5})
            assert [output async for output in RequestRun(router.service, request, context).stream]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    house = House(router, metrics, Limits())
    monkeypatch.setattr(house.front, "_app", app)
    monkeypatch.setattr(house.front, "_access_log", True)
    caplog.set_level("INFO", "tercet.access")
    await house.post(headers={"x-request-id": "mine"}, model="m")
    await house.post(model="m" * 500)
    named, unnamed = (getattr(record, "tercet_fields") for record in caplog.records)  # noqa: B009
    generated = named["output_tokens"]
    assert (named["request_id"], named["model"], named["prompt_tokens"], named["status"]) == ("mine", "m", 6, 200)
    assert generated > 0
    assert generated % 2 == 0
    assert caplog.messages[0].endswith(f", model m, 6 + {generated} tokens")
    assert len(unnamed["request_id"]) == 32  # it is made, and engines are told it
    assert len(unnamed["model"]) < 140


async def test_what_happens_to_a_request_is_logged_with_its_id(router: LiveRouter, metrics: Metrics) -> None:
    seen: list[tuple[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def later() -> None:
            seen.append(
                (request_id(), RunningSequence(Request(seq_id="s", prompt=(1,)), "p", RetryBudget(), 0.0).request_id)
            )

        await asyncio.create_task(later())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    house = House(router, metrics, Limits())
    house.front._app = app
    await house.post(headers={"x-request-id": "mine"})
    await house.post()
    assert seen[0] == ("mine", "mine")
    made, of_sequence = seen[1]
    assert made == of_sequence
    assert len(made) == 32
    assert request_id() == ""


async def test_without_being_asked_for_nothing_is_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet.access")
    await house.post()
    assert caplog.messages == []


# ---- long bodies ------------------------------------------------------------------------------------------------

LONG = {"prompt": "x", "unknown": [[]] * 300}


async def many(
    house: House, count: int, client: str = "10.0.0.1", **headers: str
) -> list[asyncio.Task[httpx.Response]]:
    transport = httpx.ASGITransport(house.front, client=(client, 1))
    asking = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    tasks = [asyncio.create_task(asking.post(PATH, json=LONG, headers=headers)) for _ in range(count)]
    for _ in range(60):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)  # they are counted in a thread
    return tasks


@pytest.fixture
def crowd(router: LiveRouter, metrics: Metrics) -> House:
    house = House(router, metrics, Limits(long_queued=2), size=100_000)
    house.app.go.clear()
    return house


async def test_a_client_has_one_long_body_in_preparation(crowd: House) -> None:
    first = await many(crowd, 4)
    assert crowd.app.running == 1
    assert [task.result().status_code for task in first if task.done()] == [429]
    other = await many(crowd, 1, "10.0.0.2")
    short = await crowd.one(prompt="x")
    assert crowd.app.running == 3, "those of others, and short ones, do not wait"
    crowd.app.go.set()
    answers = await asyncio.gather(*first, *other, short)
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429]
    assert len(crowd.front._long) == 0


async def test_two_bodies_that_are_not_short_do_not_begin_at_once(crowd: House) -> None:
    """Many of them would hold up streams as a long one does."""
    passes, began = 0, list[int]()

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        began.append(passes)
        await crowd.app(scope, receive, send)

    crowd.front._app = app
    crowd.app.go.set()
    counting = asyncio.create_task(count())
    answers = await asyncio.gather(*(crowd.client.post(PATH, json={"prompt": [[5]] * 40}) for _ in range(6)))
    counting.cancel()
    assert {answer.status_code for answer in answers} == {200}
    assert len(set(began)) == 6


async def test_once_its_sequence_runs_the_next_one_is_prepared(crowd: House) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current())
        current().prepared()
        await crowd.app(scope, receive, send)

    crowd.front._app = app
    tasks = await many(crowd, 3)
    for _ in range(60):
        await asyncio.sleep(0.001)
    assert crowd.app.running == 3
    crowd.app.go.set()
    assert {task.status_code for task in await asyncio.gather(*tasks)} == {200}
    assert len(crowd.front._long) == 0


async def test_clients_are_their_keys_where_there_are_any(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(long_queued=0), keys=("one", "two"))
    house.app.go.clear()
    first = await many(house, 1, authorization="Bearer one")
    same = await many(house, 1, "10.0.0.9", authorization="bearer one")
    other = await many(house, 1, authorization="Bearer two")
    house.app.go.set()
    assert [(await task).status_code for task in (*first, *same, *other)] == [200, 429, 200]


async def test_a_long_body_that_waits_at_the_gate_keeps_no_turn(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, Limits(in_flight=1, long_queued=0))
    (running,) = await house.fill(1, prompt="x")
    waiting = [(await many(house, 1))[0] for _ in range(3)]
    assert not any(task.done() for task in waiting), "it is the gate's queue in which they wait"
    house.app.go.set()
    assert {(await task).status_code for task in (running, *waiting)} == {200}
    assert house.is_empty
    assert len(house.front._long) == 0


async def test_a_refused_long_body_gives_its_turn_back(crowd: House) -> None:
    wrong = {"prompt": "x", "unknown": [[]] * 5000}
    answers = [await crowd.client.post(PATH, json=wrong) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {400}
    assert len(crowd.front._long) == 0
