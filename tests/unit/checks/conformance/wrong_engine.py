"""A simulated engine that breaks the protocol in one way, chosen by name; behind it stands the sound one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tercet.protocol import (
    BadRequest,
    EngineError,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    TercetError,
    UnknownSequence,
    Usage,
)
from tercet.protocol.wire import API_PREFIX
from tercet.wire.serving.http_server import error_response, json_response
from tercet_lab.sim import SimEngine
from tercet_lab.sim.sim_verbs import SimVerbs

Handler = Callable[[HttpRequest], Awaitable[Response]]
# The fields of an answer's status and body, which a fault may change.
Said = tuple[int, Any]
Changed = Iterable[Output]


class Fault(msgspec.Struct, frozen=True):
    """A way to break the protocol; the checks that must notice; whether the engine has a secret."""

    plant: Callable[[WrongVerbs], None]
    checks: frozenset[str]
    secret: str


FAULTS: dict[str, Fault] = {}


def fault(*checks: str, secret: str = "") -> Callable[[Callable[[WrongVerbs], None]], None]:
    def add(plant: Callable[[WrongVerbs], None]) -> None:
        FAULTS[plant.__name__.replace("_", " ")] = Fault(plant, frozenset(checks), secret)

    return add


class WrongVerbs(SimVerbs):
    """The verbs of an engine with one fault, which changes requests, answers, outputs, or the engine itself."""

    def __init__(self, engine: SimEngine, keys: Sequence[str], model: str, planted: Fault) -> None:
        super().__init__(engine, keys, model)
        self.engine: Any = engine
        self.before: Callable[[str, HttpRequest], Awaitable[Response | None]] | None = None
        self.after: dict[str, Callable[[int, Any], Said]] = {}
        planted.plant(self)

    def routes(self) -> list[Route]:
        routes = super().routes()
        return [Route(each.path, self._wrong(each.endpoint), methods=[*(each.methods or ())]) for each in routes]

    def _wrong(self, handler: Handler) -> Handler:
        async def handled(http: HttpRequest) -> Response:
            verb = http.url.path.removeprefix(f"{API_PREFIX}/")
            if self.before is not None:
                await http.body()
                if (answer := await self.before(verb, http)) is not None:
                    return answer
                http = HttpRequest(http.scope, again(await http.body(), http))
            try:
                answer = await handler(http)
            except TercetError as error:
                answer = error_response(error, self.callers)
            change = self.after.get(verb, self.after.get("any"))
            if change is None or isinstance(answer, StreamingResponse):
                return answer
            status, said = change(answer.status_code, msgspec.json.decode(answer.body))
            changed = json_response(said, status)
            for name in ("www-authenticate",):
                changed.headers.update({name: answer.headers[name]} if name in answer.headers else {})
            return changed

        return handled

    def fields(self, verb: str, **changes: Any) -> None:
        """Change fields of the answers of a verb that succeeds."""
        self.after[verb] = lambda status, said: (status, {**said, **changes} if status == 200 else said)

    def outputs(self, change: Callable[[Output, Request], Changed]) -> None:
        """Change the outputs of every generation."""
        real = self.engine.start_generate

        def start(request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
            async def produce(stream: OutputStream) -> None:
                async with aclosing(real(request, begin, output)) as inner:
                    async for each in inner:
                        for changed in change(each, request):
                            stream.put(changed)

            return OutputStream(produce)

        self.engine.start_generate = start

    def instead(self, method: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of the engine by what ``make`` returns for the real one."""
        setattr(self.engine, method, make(getattr(self.engine, method)))


def shifted(output: Output) -> Output:
    """The output with other tokens."""
    return msgspec.structs.replace(output, token_ids=tuple(token + 1 for token in output.token_ids))


def again(body: bytes, http: HttpRequest) -> Callable[[], Awaitable[Any]]:
    """The receiver of a request whose body was read, and may have been changed."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else await http.receive()

    return receive


def body_of(http: HttpRequest, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Change the body of a request that has been read."""
    read: Any = http
    try:
        said = msgspec.json.decode(read._body)
        if isinstance(said, dict):
            read._body = msgspec.json.encode(change(said))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        return


# ---- status --------------------------------------------------------------------------------------------------


@fault("status")
def does_not_say_which_start_it_is(wrong: WrongVerbs) -> None:
    wrong.fields("status", incarnation="")


@fault("status")
def says_more_blocks_are_free_than_there_are(wrong: WrongVerbs) -> None:
    wrong.fields("status", free_blocks=10**6)


@fault("all-is-free-at-rest")
def counts_cached_blocks_as_taken(wrong: WrongVerbs) -> None:
    def change(status: int, said: Any) -> Said:
        return status, {**said, "free_blocks": said["free_blocks"] - wrong.engine.pool.cached}

    wrong.after["status"] = change


@fault("progress-of-the-core")
def reports_no_progress(wrong: WrongVerbs) -> None:
    wrong.fields("status", stalled_s=99.0)


@fault("progress-of-the-core")
def waits_for_the_batch_before_it_tells_its_status(wrong: WrongVerbs) -> None:
    def slow(real: Any) -> Any:
        async def status() -> Any:
            if wrong.engine.busy:
                await asyncio.sleep(3.0)
            return await real()

        return status

    wrong.instead("status", slow)


@fault("sequences-are-listed")
def lists_no_sequences(wrong: WrongVerbs) -> None:
    wrong.after["sequences"] = lambda status, said: (status, [])


@fault("calls-for-another-start")
def serves_calls_for_another_start(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        with_headers(http, x_tercet_incarnation="")

    wrong.before = before


# ---- generation ----------------------------------------------------------------------------------------------


@fault("streams-end-properly")
def ends_streams_without_a_reason(wrong: WrongVerbs) -> None:
    wrong.outputs(lambda output, _: [msgspec.structs.replace(output, finish_reason=None)])


@fault("streams-end-properly")
def loses_a_token(wrong: WrongVerbs) -> None:
    seen: dict[str, int] = {}

    def change(output: Output, request: Request) -> Changed:
        seen[request.seq_id] = seen.get(request.seq_id, 0) + 1
        return [] if seen[request.seq_id] == 4 else [output]

    wrong.outputs(change)


@fault("one-answer-instead-of-a-stream")
def answers_with_the_last_output_only(wrong: WrongVerbs) -> None:
    wrong.after["start_generate"] = lambda status, said: (
        status, {**said, "token_ids": said["token_ids"][-1:]} if "token_ids" in said else said,
    )  # fmt: skip


@fault("usage-adds-up")
def says_nothing_of_its_work(wrong: WrongVerbs) -> None:
    wrong.outputs(lambda output, _: [msgspec.structs.replace(output, usage=None)])


@fault("usage-adds-up")
def repeats_its_usage(wrong: WrongVerbs) -> None:
    wrong.outputs(lambda output, _: [msgspec.structs.replace(output, usage=output.usage or Usage())])


@fault("output-from-elsewhere")
def sends_given_output_again(wrong: WrongVerbs) -> None:
    def again(real: Any) -> Any:
        return lambda request, begin=0, output=(): real(request, begin)

    wrong.instead("start_generate", again)


def without_salt(request: Request) -> Request:
    return msgspec.structs.replace(request, cache_salt=None)


@fault("salts-separate-caches", "matched-length-of-a-known-prompt")
def shares_the_cache_between_salts(wrong: WrongVerbs) -> None:
    wrong.instead("start_generate", lambda real: lambda request, *rest: real(without_salt(request), *rest))
    wrong.instead("reserve", lambda real: lambda request, *rest: real(without_salt(request), *rest))


@fault("salts-separate-caches")
def has_no_prefix_cache(wrong: WrongVerbs) -> None:
    def alone(request: Request, *rest: Any) -> Request:
        return msgspec.structs.replace(request, cache_salt=f"{request.cache_salt}{request.seq_id}")

    wrong.instead("start_generate", lambda real: lambda request, *rest: real(alone(request), *rest))


@fault("text-prompts")
def takes_tokens_only(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> Response | None:
        if b'"Once upon' in await http.body():
            return json_response(BadRequest("prompt: must be tokens", "prompt").to_wire(), 400)
        return None

    wrong.before = before


@fault("leaving-ends-a-sequence")
def goes_on_when_the_caller_has_left(wrong: WrongVerbs) -> None:
    def lasting(real: Any) -> Any:
        def start(request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
            async def produce(stream: OutputStream) -> None:
                async def all_of_it() -> None:
                    async with aclosing(real(request, begin, output)) as inner:
                        async for each in inner:
                            stream.put(each)

                await asyncio.shield(asyncio.ensure_future(all_of_it()))

            return OutputStream(produce)

        return start

    wrong.instead("start_generate", lasting)


async def nothing(*_: Any) -> None:
    pass


@fault("abort-in-the-middle", "abort-ends-a-lease", "abort-of-a-send", "abort-while-kv-arrives")
def aborts_nothing(wrong: WrongVerbs) -> None:
    wrong.instead("abort", lambda real: nothing)


@fault("abort-in-the-middle")
def says_that_an_aborted_sequence_is_complete(wrong: WrongVerbs) -> None:
    def change(output: Output, _: Request) -> Changed:
        return [msgspec.structs.replace(output, finish_reason="stop") if output.finish_reason == "abort" else output]

    wrong.outputs(change)


@fault("abort-in-the-middle")
def knows_no_abort_of_the_unknown(wrong: WrongVerbs) -> None:
    def change(status: int, said: Any) -> Said:
        unknown = UnknownSequence("no such sequence", "seq_id")
        return (404, unknown.to_wire()) if said == {"aborted": False} else (status, said)

    wrong.after["abort"] = change


@fault("one-sequence-for-each-id")
def runs_two_sequences_under_one_id(wrong: WrongVerbs) -> None:
    def renamed(real: Any) -> Any:
        def start(request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
            if request.seq_id in wrong.engine._generating:
                request = msgspec.structs.replace(request, seq_id=f"{request.seq_id}+")
            return real(request, begin, output)

        return start

    wrong.instead("start_generate", renamed)


@fault("sequences-at-once")
def mixes_up_sequences_of_a_batch(wrong: WrongVerbs) -> None:
    wrong.outputs(lambda output, _: [shifted(output) if wrong.engine.counters.running > 1 else output])


@fault("token-streams")
def does_not_connect(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> Response | None:
        return json_response({"connected": True}) if verb == "connect" else None

    wrong.before = before


# ---- leases --------------------------------------------------------------------------------------------------


@fault("reservations-take-blocks", "leases-are-extended")
def takes_no_blocks_before_kv_comes(wrong: WrongVerbs) -> None:
    wrong.fields("status", free_blocks=wrong.engine.pool.total)


@fault("reservations-take-blocks")
def keeps_the_blocks_of_a_released_lease(wrong: WrongVerbs) -> None:
    wrong.engine._leases.give_back = lambda lease: None


@fault("ends-of-ranges")
def takes_ends_as_inclusive(wrong: WrongVerbs) -> None:
    def more(end: int | None) -> int | None:
        return end if end is None else end + 1

    wrong.instead("reserve", lambda real: lambda request, end, ttl: real(request, more(end), ttl))


@fault("ends-of-ranges")
def reserves_nothing_when_asked_for_nothing(wrong: WrongVerbs) -> None:
    wrong.instead("reserve", lambda real: lambda request, end, ttl: real(request, end or None, ttl))


@fault("matched-length-of-a-known-prompt")
def does_not_match_in_prep_recv(wrong: WrongVerbs) -> None:
    wrong.fields("prep_recv", matched_len=0)


@fault("one-lease-for-each-id")
def replaces_the_lease_of_a_sequence(wrong: WrongVerbs) -> None:
    def replacing(real: Any) -> Any:
        async def reserve(request: Request, end: int | None, ttl: float) -> Reservation:
            if (held := wrong.engine._leases.of(request.seq_id)) is not None:
                await wrong.engine.release(held.name)
            return await real(request, end, ttl)

        return reserve

    wrong.instead("reserve", replacing)


@fault("leases-expire", "late-writes")
def holds_leases_for_ever(wrong: WrongVerbs) -> None:
    wrong.instead("reserve", lambda real: lambda request, end, ttl: real(request, end, 1e6))


@fault("leases-expire")
def grants_any_time(wrong: WrongVerbs) -> None:
    wrong.fields("prep_recv", ttl=10_000_000.0)


@fault("double-release")
def releases_what_it_does_not_hold(wrong: WrongVerbs) -> None:
    wrong.after["release"] = lambda status, said: (200, {"valid_end": 0}) if status == 404 else (status, said)


@fault("leases-are-extended")
def extends_by_other_tokens(wrong: WrongVerbs) -> None:
    def trusting(real: Any) -> Any:
        async def extend(lease: str, request: Request, end: int | None) -> Any:
            if (held := wrong.engine._leases.find(lease)) is not None:
                tokens = (*held.prompt.tokens[: held.end], *request.prompt[held.end :])
                request = msgspec.structs.replace(request, prompt=tokens)
            return await real(lease, request, end)

        return extend

    wrong.instead("extend", trusting)


@fault("leases-are-extended")
def extends_a_lease_by_another_one(wrong: WrongVerbs) -> None:
    def change(status: int, said: Any) -> Said:
        if status == 200 and said["kv_addr_info"]["lease"] in seen:
            said["kv_addr_info"]["lease"] += "+"
        elif status == 200:
            seen.add(said["kv_addr_info"]["lease"])
        return status, said

    seen = set[str]()
    wrong.after["prep_recv"] = change


@fault("generation-takes-the-lease")
def believes_that_everything_arrived(wrong: WrongVerbs) -> None:
    def change(output: Output, request: Request) -> Changed:
        usage = output.usage
        if usage is not None and request.seq_id in held:
            usage = Usage(received=usage.computed - 1, computed=1)
        return [msgspec.structs.replace(output, usage=usage)]

    held = set[str]()

    def noted(real: Any) -> Any:
        async def reserve(request: Request, end: int | None, ttl: float) -> Reservation:
            held.add(request.seq_id)
            return await real(request, end, ttl)

        return reserve

    wrong.instead("reserve", noted)
    wrong.outputs(change)


@fault("generation-of-another-prompt")
def drops_the_lease_of_another_prompt(wrong: WrongVerbs) -> None:
    def forgiving(real: Any) -> Any:
        def start(request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
            held = wrong.engine._leases.of(request.seq_id)
            if held is not None and held.prompt.tokens[: held.end] != request.prompt[: held.end]:
                wrong.engine._leases.end(held)
            return real(request, begin, output)

        return start

    wrong.instead("start_generate", forgiving)


@fault("no-space-is-said")
def fails_when_it_is_full(wrong: WrongVerbs) -> None:
    wrong.after["prep_recv"] = lambda status, said: (500, EngineError("full").to_wire()) if status == 503 else (
        status, said,
    )  # fmt: skip


@fault("no-space-is-said")
def keeps_what_it_reserved_of_a_refused_one(wrong: WrongVerbs) -> None:
    def leaking(real: Any) -> Any:
        async def reserve(request: Request, end: int | None, ttl: float) -> Reservation:
            try:
                return await real(request, end, ttl)
            except TercetError:
                await real(msgspec.structs.replace(request, seq_id=f"{request.seq_id}+"), 1, ttl)
                raise

        return reserve

    wrong.instead("reserve", leaking)


# ---- what is refused -----------------------------------------------------------------------------------------


@fault("garbage-bodies")
def fails_at_garbage(wrong: WrongVerbs) -> None:
    wrong.after["any"] = lambda status, said: (
        (500, EngineError("traceback").to_wire()) if status == 400 and not said["error"]["param"] else (status, said)
    )  # fmt: skip


@fault("garbage-bodies")
def has_errors_of_its_own_form(wrong: WrongVerbs) -> None:
    wrong.after["any"] = lambda status, said: (status, {"detail": "bad"} if status == 400 else said)


@fault("wrong-fields-are-named")
def takes_unknown_fields(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        body_of(http, lambda said: {name: value for name, value in said.items() if name != "nonsense"})

    wrong.before = before


@fault("wrong-fields-are-named", "wrong-values-are-named")
def does_not_name_fields(wrong: WrongVerbs) -> None:
    def change(status: int, said: Any) -> Said:
        return status, {"error": {**said["error"], "param": None}} if status == 400 else said

    wrong.after["any"] = change


@fault("wrong-values-are-named")
def mends_wrong_values(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        body_of(http, lambda said: {**said, **({"begin": max(0, said["begin"])} if "begin" in said else {})})

    wrong.before = before


@fault("unknown-adapters")
def computes_with_the_base_model_instead(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        body_of(http, lambda said: {name: value for name, value in said.items() if name != "adapter"})

    wrong.before = before


def with_headers(http: HttpRequest, **changes: str) -> None:
    """Replace headers of a request that has been read."""
    new = {name.replace("_", "-").encode(): value.encode() for name, value in changes.items()}
    kept = [(name, value) for name, value in http.scope["headers"] if name not in new]
    http.scope["headers"] = [*kept, *((name, value) for name, value in new.items() if value)]


@fault("types-of-bodies")
def reads_any_type_of_body(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        if http.headers.get("content-type") != "application/msgpack":
            with_headers(http, content_type="application/json", content_encoding="")

    wrong.before = before


@fault("web-pages-are-refused")
def serves_web_pages(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        with_headers(http, origin="")

    wrong.before = before


@fault("strangers-are-refused", secret="s3cret")
def serves_whoever_shows_some_key(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        if http.headers.get("authorization", "").startswith("Bearer w"):
            with_headers(http, authorization="Bearer s3cret")

    wrong.before = before


@fault("proofs-are-for-one-call", secret="s3cret")
def takes_a_proof_twice(wrong: WrongVerbs) -> None:
    every_number = SimpleNamespace(take=lambda _: True)
    callers: Any = wrong.callers
    callers._seen = SimpleNamespace(get=lambda _: every_number)


# ---- KV between engines --------------------------------------------------------------------------------------


@fault("two-engines-of-one-model")
def has_other_weights(wrong: WrongVerbs) -> None:
    wrong.outputs(lambda output, _: [shifted(output)])


@fault("kv-arrives", "transfers-at-once", "parts-of-a-prompt")
def decodes_on_other_blocks_than_those_that_arrived(wrong: WrongVerbs) -> None:
    received = set[str]()

    def change(output: Output, request: Request) -> Changed:
        if output.usage is not None and output.usage.received:
            received.add(request.seq_id)
        return [shifted(output) if request.seq_id in received else output]

    wrong.outputs(change)


@fault("kv-leaves")
def does_not_send_the_last_block(wrong: WrongVerbs) -> None:
    def shorter(real: Any) -> Any:
        async def send(request: Request, to: Any, begin: int, end: int | None, sample: bool = False) -> Sent:
            if sample or end is None or end - begin < 33:
                return await real(request, to, begin, end, sample)
            sent = await real(request, to, begin, end // 16 * 16 - 16, sample)
            return msgspec.structs.replace(sent, end=end, usage=Usage(computed=end))

        return send

    wrong.instead("remote_send", shorter)


@fault("kv-leaves")
def answers_before_the_kv_has_arrived(wrong: WrongVerbs) -> None:
    def early(real: Any) -> Any:
        async def send(request: Request, to: Any, begin: int, end: int | None, sample: bool = False) -> Sent:
            if sample or end is None:
                return await real(request, to, begin, end, sample)
            task = asyncio.ensure_future(real(request, to, begin, end, sample))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            return Sent(begin, end, 1, 1, 0.0, Usage(computed=end))

        return send

    wrong.instead("remote_send", early)


@fault("first-token-with-the-send")
def samples_no_first_token(wrong: WrongVerbs) -> None:
    wrong.after["remote_send"] = lambda status, said: (
        status, {name: value for name, value in said.items() if name != "first"}
    )  # fmt: skip


@fault("first-token-with-the-send")
def says_that_the_first_token_ends_the_request(wrong: WrongVerbs) -> None:
    def change(status: int, said: Any) -> Said:
        if "first" in said:
            said["first"]["finish_reason"] = "length"
        return status, said

    wrong.after["remote_send"] = change


def without_cached_only(said: dict[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in said.items() if name != "cached_only"}


@fault("cached-kv-alone")
def computes_what_is_not_cached(wrong: WrongVerbs) -> None:
    async def before(verb: str, http: HttpRequest) -> None:
        body_of(http, without_cached_only)

    wrong.before = before


@fault("cached-kv-alone")
def sends_no_part_of_what_is_cached(wrong: WrongVerbs) -> None:
    def all_or_nothing(real: Any) -> Any:
        async def send(*args: Any) -> Sent:
            sent, (_, _, begin, end, _, only) = await real(*args), args
            return msgspec.structs.replace(sent, end=begin) if only and sent.end != end else sent

        return send

    wrong.instead("remote_send", all_or_nothing)


@fault("parts-of-a-prompt")
def counts_kv_after_a_gap(wrong: WrongVerbs) -> None:
    wrong.instead("take_in", lambda real: lambda lease, begin, end: real(lease, 0, end))


@fault("ranges-of-sends")
def sends_empty_ranges(wrong: WrongVerbs) -> None:
    def change(status: int, said: Any) -> Said:
        empty = Sent(0, 0, 0, 0, 0.0, Usage())
        return (200, msgspec.to_builtins(empty)) if status == 400 and said["error"]["param"] == "begin" else (
            status, said,
        )  # fmt: skip

    wrong.after["remote_send"] = change


@fault("received-kv-is-prefix-cache")
def forgets_received_kv(wrong: WrongVerbs) -> None:
    wrong.engine._leases.publish = lambda lease: None


@fault("kv-of-other-contents")
def takes_kv_of_other_contents(wrong: WrongVerbs) -> None:
    def blind(real: Any) -> Any:
        def refuses(lease: str, content: Any) -> str | None:
            return None if wrong.engine._leases.find(lease) is not None else real(lease, content)

        return refuses

    wrong.instead("refuses_content", blind)


@fault("kv-for-a-wrong-lease", "late-writes")
def takes_kv_for_any_lease(wrong: WrongVerbs) -> None:
    def open_to_all(real: Any) -> Any:
        def refuses(lease: str, content: Any) -> str | None:
            return None if wrong.engine._leases.find(lease) is None else real(lease, content)

        return refuses

    wrong.instead("refuses_content", open_to_all)


@fault("kv-for-a-wrong-lease")
def writes_to_the_only_lease_that_it_has(wrong: WrongVerbs) -> None:
    def first(lease: str) -> str:
        return next(iter(wrong.engine._leases._by_name), lease)

    wrong.instead("refuses_content", lambda real: lambda lease, content: real(first(lease), content))
    wrong.instead("take_in", lambda real: lambda lease, begin, end: real(first(lease), begin, end))


@fault("kv-renews-a-lease")
def counts_a_lease_from_its_beginning(wrong: WrongVerbs) -> None:
    leases, renewed = wrong.engine._leases, set[str]()
    renew = leases.renew

    def once(lease: Any) -> None:
        if lease.name not in renewed:
            renewed.add(lease.name)
            renew(lease)

    leases.renew = once


@fault("abort-while-kv-arrives")
def keeps_leases_when_a_sequence_is_aborted(wrong: WrongVerbs) -> None:
    wrong.engine._leases.abort = lambda seq_id: None


@fault("a-sender-that-goes-away")
def goes_on_with_a_send_whose_caller_has_left(wrong: WrongVerbs) -> None:
    def lasting(real: Any) -> Any:
        async def send(*given: Any) -> Sent:
            return await asyncio.shield(asyncio.ensure_future(real(*given)))

        return send

    wrong.instead("remote_send", lasting)


@fault("running-sequences-move")
def sends_no_kv_of_what_runs(wrong: WrongVerbs) -> None:
    def refusing(real: Any) -> Any:
        async def send(request: Request, *rest: Any) -> Sent:
            if request.seq_id in wrong.engine._generating:
                raise EngineError("the sequence runs")
            return await real(request, *rest)

        return send

    wrong.instead("remote_send", refusing)


@fault("kv-under-an-extended-lease")
def forgets_kv_when_a_lease_is_extended(wrong: WrongVerbs) -> None:
    def forgetting(real: Any) -> Any:
        async def extend(lease: str, request: Request, end: int | None) -> Any:
            if (held := wrong.engine._leases.find(lease)) is not None:
                held.received.clear()
            return await real(lease, request, end)

        return extend

    wrong.instead("extend", forgetting)


@fault("layouts-that-do-not-match")
def sends_to_any_layout(wrong: WrongVerbs) -> None:
    def trusting(real: Any) -> Any:
        async def send(request: Request, to: Reservation, *rest: Any) -> Sent:
            info = msgspec.structs.replace(to.kv_addr_info, layout=wrong.engine._layout)
            return await real(request, Reservation(info, to.matched_len), *rest)

        return send

    wrong.instead("remote_send", trusting)
