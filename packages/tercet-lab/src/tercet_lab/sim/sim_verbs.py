"""The verbs of one simulated engine over HTTP. Calls, answers and errors are those of the vLLM plugin.

Simulated engines of different processes do not send KV to each other: a message says when the KV would have arrived.
The sender's link out is simulated as in one process. The receiver's link in is not: senders in different processes do
not wait for each other there.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.aio.tasks import TaskSet
from tercet.engine.edge import propose_move
from tercet.engine.leases import time_to_live
from tercet.logs import LoggedGeneration, is_access_logged
from tercet.protocol import (
    BadRequest,
    Content,
    EngineError,
    EngineStatus,
    KVAddrInfo,
    OutputStream,
    Request,
    Reservation,
    Sent,
    SequenceReport,
    TercetError,
    UnknownSequence,
)
from tercet.protocol.request_checks import VERB_FORMS
from tercet.protocol.wire import (
    API_PREFIX,
    JSON,
    MoveCall,
    PrepRecvAnswer,
    PrepRecvCall,
    RemoteSendCall,
    SequenceCall,
    StartGenerateCall,
)
from tercet.router.request_bodies import LARGEST_AT_ONCE, BodiesHeld
from tercet.wire.callers import Callers, Prover, ShownHeaders
from tercet.wire.client.bounded_answers import PLAIN, proved, read_answer
from tercet.wire.serving import http_server
from tercet.wire.serving.http_server import error_handlers, error_response
from tercet.wire.serving.server_access import read_whole
from tercet.wire.serving.verb_routes import LONGEST_BODY, ROUTES, VerbRoute, VerbServer, starlette_routes, verb_route
from tercet.wire.streams import RouterConnection, RouterConnections, SequenceSender
from tercet_lab.sim.block_pool import VOCABULARY, Prompt
from tercet_lab.sim.network import Network, SendTarget
from tercet_lab.sim.sim_engine import SimEngine
from tercet_lab.sim.step_times import Transfer

C = TypeVar("C")
DELIVER = "/sim/deliver"
ADDRESS = re.compile(r"http://[^/\s]{1,255}:[0-9]{1,5}")
MOST_PEERS = 1024
"""Most engines whose proofs an engine remembers."""
ASKS_FOR_A_KEY = "this engine requires its fleet's secret (TERCET_SECRET): Authorization: Bearer KEY"
# The answer needs no engine step, so a peer that takes longer is dead.
ANSWER = aiohttp.ClientTimeout(total=10.0)


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /tercet/v1/sim/deliver``: KV, from token ``begin`` on, would have arrived under ``lease`` now.

    ``content`` identifies the KV and has its end. The answer is the reason for a refusal, or null.
    """

    lease: str
    begin: int
    content: Content


class HttpNetwork(Network):
    """The network of an engine in its own process. It reaches other engines by the addresses in their reservations."""

    def __init__(self, transfer: Transfer, session: aiohttp.ClientSession, secret: str = "") -> None:
        super().__init__()
        self._secret = secret
        self._provers: dict[str, Prover] = {}
        self.transfer = transfer  # assume that peers are as fast as this engine
        self.posting = TaskSet()
        self._session = session

    def find(self, info: KVAddrInfo) -> SendTarget:
        """Do as :meth:`~.network.Network.find`. Raise ``BadRequest`` if the address is not a simulated engine's."""
        addresses = [address for rank in info.ranks for address in rank.addresses]
        if info.transport != "sim" or len(addresses) != 1 or not ADDRESS.fullmatch(addresses[0]):
            raise BadRequest("kv_addr_info: is not from prep_recv of a simulated engine", "kv_addr_info")
        return RemoteEngine(info.engine, addresses[0], self)

    async def deliver(self, url: str, delivery: Delivery, answer: Callable[[str | None], None]) -> None:
        """Send a delivery to a peer. Call ``answer`` with its refusal, an error, or None."""
        prover, data = self._provers.setdefault(url, Prover(self._secret)), msgspec.json.encode(delivery)
        if len(self._provers) > MOST_PEERS:
            del self._provers[next(iter(self._provers))]

        async def ask(proof: dict[str, str]) -> aiohttp.ClientResponse:
            headers = {"content-type": JSON, **PLAIN, **proof}
            return await self._session.post(
                url + API_PREFIX + DELIVER, data=data, headers=headers, timeout=ANSWER, allow_redirects=False
            )

        try:
            async with await proved(prover, "POST", DELIVER, data, ask) as response:
                status, body = response.status, await read_answer(response)
            said = msgspec.json.decode(body, type=str | None) if status == 200 else f"{status}"
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            said = f"the receiver does not answer: {error}"
        answer(said)


class RemoteEngine:
    """An engine of another process: a :class:`~tercet_lab.sim.network.SendTarget`."""

    def __init__(self, name: str, url: str, network: HttpNetwork) -> None:
        self.name = name
        self.transfer = network.transfer
        self._url = url
        self._network = network

    def refuses(self, lease: str, prompt: Prompt, end: int) -> str | None:
        """Return None: a refusal is known only when the receiver answers."""
        return None

    def receive(self, lease: str, prompt: Prompt, begin: int, end: int, answer: Callable[[str | None], None]) -> None:
        delivery = Delivery(lease, begin, prompt.content(end))
        self._network.posting.spawn(self._network.deliver(self._url, delivery, answer))


# Options that a simulated engine does not support.
REFUSED = ("logprobs", "prompt_logprobs", "structured_outputs")


def tokens_of(prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return token ids unchanged, and one token id per word for a text."""
    if isinstance(prompt, str):
        return tuple(zlib.crc32(word.encode()) % VOCABULARY for word in prompt.split())
    return tuple(prompt)


def text_of(tokens: Sequence[int]) -> str:
    """Return a text with one word (``w`` and the id) per token."""
    return "".join(f" w{token}" for token in tokens)


class SimVerbs:
    """The verbs of one simulated engine, as its routes call them.

    If ``keys`` are given, a caller must prove or show one of them. The log names the model ``model``.
    """

    def __init__(self, engine: SimEngine, keys: Sequence[str] = (), model: str = "") -> None:
        self._engine, self._model = engine, model
        self.incarnation, self.callers = engine.incarnation, Callers(keys)
        self.relay = StreamRelay(RouterConnections(engine.name, engine.incarnation, engine.load, self.stream))

    def app(self, more: Sequence[Route] = ()) -> Starlette:
        """Return the engine's application: the routes of its verbs, and ``more``."""
        app = Starlette(routes=[*self.routes(), *more], exception_handlers=error_handlers(self.callers))
        app.state.tercet = self._engine
        app.state.tercet_verbs = VerbServer(self, self.relay.router_connections, self.callers, ASKS_FOR_A_KEY)
        return app

    def routes(self) -> list[Route]:
        return starlette_routes([*ROUTES, *DELIVERIES])

    def model_of(self, call: SequenceCall) -> str:
        return call.adapter or self._model

    async def prep_recv(self, call: PrepRecvCall) -> PrepRecvAnswer:
        if call.lease is not None:
            found, ttl = await self._engine.extend(call.lease, request_of(call), call.end)
        else:
            ttl = time_to_live(call.ttl, self._engine.options.lease_ttl)
            found = await self._engine.reserve(request_of(call), call.end, ttl)
        return PrepRecvAnswer(kv_addr_info=found.kv_addr_info, matched_len=found.matched_len, ttl=ttl)

    async def remote_send(self, call: RemoteSendCall) -> Sent:
        """Prefill, then notify the receiver when the KV would have arrived."""
        to = Reservation(call.kv_addr_info, call.kv_addr_info.begin)
        return await self._engine.remote_send(
            request_of(call), to, call.begin, call.end, call.sample, call.cached_only
        )  # fmt: skip

    def start_generate(self, call: StartGenerateCall) -> OutputStream:
        request = request_of(call)
        outputs = self._engine.start_generate(request, call.begin, call.output)
        if is_access_logged():
            given = request.num_tokens + len(call.output)
            outputs.subscribe(LoggedGeneration(call.seq_id, self.model_of(call), given))
        return outputs

    async def stream(self, call: StartGenerateCall, link: RouterConnection, number: int) -> None:
        self.relay.start(call.seq_id, link, number, len(call.output), self.start_generate(call))

    async def abort(self, seq_id: str) -> bool:
        known = self._engine.works_on(seq_id)
        await self._engine.abort(seq_id)
        return known

    async def release(self, lease: str) -> int:
        return await self._engine.release(lease)

    async def status(self) -> EngineStatus:
        return await self._engine.status()

    async def sequences(self) -> list[SequenceReport]:
        senders = self.relay.senders
        return [
            msgspec.structs.replace(found, router=senders[found.seq_id].connection.address)
            if found.seq_id in senders
            else found
            for found in await self._engine.sequences()
        ]

    def leases(self, seq_id: str) -> NoReturn:
        raise UnknownSequence("seq_id: a simulated engine keeps no stories of leases", "seq_id")

    def propose_move(self, seq_id: str, call: MoveCall) -> None:
        senders = {found.seq_id: self.relay.senders.get(found.seq_id) for found in self._engine.reports()}
        propose_move(senders, seq_id, call)


DELIVERIES = list[VerbRoute]()


@verb_route(DELIVERIES, "POST", DELIVER, Delivery)
async def _deliver(server: VerbServer, http: HttpRequest, news: Delivery) -> Any:
    """Record a delivery from a sender in another process. Answer with the refusal, or null."""
    engine: SimEngine = http.app.state.tercet
    refusal = engine.refuses_content(news.lease, news.content)
    if refusal is None:
        engine.take_in(news.lease, news.begin, news.content.end)
    return refusal


def request_of(call: PrepRecvCall | RemoteSendCall | StartGenerateCall) -> Request:
    """Return the request of a call. Raise :class:`~tercet.protocol.BadRequest` for unsupported options."""
    sampling: Mapping[str, Any] = {} if isinstance(call, PrepRecvCall) else call.sampling_params
    for name in REFUSED:
        if sampling.get(name) is not None:
            at = f"sampling_params.{name}"
            raise BadRequest(f"{at}: a simulated engine does not support it; remove it", at)
    return Request(
        background=not isinstance(call, PrepRecvCall) and call.background, seq_id=call.seq_id,
        prompt=tokens_of(call.prompt), sampling_params=sampling, cache_salt=call.cache_salt, adapter=call.adapter,
        adapter_digest=call.adapter_digest, mm_features=call.mm_features,
    )  # fmt: skip


async def call_in(http: HttpRequest, kind: type[C], forms: Sequence[str] = VERB_FORMS) -> C:
    """Read the call in a request's body. Raise :class:`~tercet.protocol.TercetError` for another form of body."""
    return await http_server.call_in(http, kind, LONGEST_BODY, "this engine", forms)


class HeldBodies:
    """An application whose bodies are read before it: at most :data:`LONGEST_BODY` bytes each, a multiple of it in all.

    Of bodies that exceed the sum the largest is refused, while its request waits or runs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bodies = BodiesHeld(LARGEST_AT_ONCE * LONGEST_BODY)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.one() as body:
            announced = ShownHeaders.of_asgi(scope["headers"]).all("content-length")
            try:
                async with body.until_let_go():
                    whole = await read_whole(receive, "".join(announced[:1]), LONGEST_BODY, "this engine", body)
            except TercetError as error:
                await error_response(error, None)(scope, receive, send)
                return
            unread: list[Message] = [{"type": "http.request", "body": body.content, "more_body": False}]

            async def again() -> Message:
                return unread.pop() if unread else await receive()

            if whole:
                await self._app(scope, again, send)


class StreamRelay:
    """A generator for routers: each sequence runs in a task that ends when its router disconnects.

    ``senders`` has the sender of each sequence's outputs, by its id.
    """

    def __init__(self, router_connections: RouterConnections) -> None:
        self.router_connections = router_connections
        self.senders: dict[str, SequenceSender] = {}
        self._tasks = TaskSet()

    def start(self, seq_id: str, link: RouterConnection, number: int, position: int, outputs: OutputStream) -> None:
        """Generate; ``position`` is the position of the first token in the sequence's output. Errors are also sent.

        Raises :class:`~tercet.protocol.Conflict` if the sequence was cancelled before it began.
        """
        running: list[asyncio.Task[None]] = []
        sender = link.sender(number, position, lambda: [task.cancel() for task in running])
        self.senders.setdefault(seq_id, sender)  # the engine refuses a second sequence with the same id
        running.append(self._tasks.spawn(self._relay(seq_id, sender, outputs)))

    async def _relay(self, seq_id: str, sender: SequenceSender, outputs: OutputStream) -> None:
        try:
            await outputs.run(sender.send)
            if sender.open:
                sender.fail(EngineError("the engine ended the sequence without a finish reason"))
        except Exception as error:  # an error fails only its sequence
            sender.fail(error)
        finally:
            sender.close()
            if self.senders.get(seq_id) is sender:
                del self.senders[seq_id]

    async def close(self) -> None:
        """End all sequences, and close every connection."""
        self.router_connections.close()
        await self._tasks.close()
