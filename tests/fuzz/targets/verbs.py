"""The verbs over HTTP, on vLLM's API layer, scheduler and block pool: all of an engine but the model and the processes.

What goes to the core is packed as vLLM packs it and read as its core reads it, where an error would end the engine.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tercet.cluster.model import resolve_model
from tercet.engine.agents import AgentCalls
from tercet.engine.edge import Edge
from tercet.engine.interface import EngineDescription
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.verbs import EdgeVerbs
from tercet.protocol import EngineLoad
from tercet.protocol.names import AllowedPrefillers
from tercet.protocol.wire import API_PREFIX
from tercet.transport import SendDone
from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.core.core_methods import CoreCalls, status
from tercet.vllm_plugin.edge.attached_engine import AttachedEngine
from tercet.vllm_plugin.edge.llm_requests import LLMGeneration
from tercet.vllm_plugin.endpoint import TercetEndpoints
from tercet.vllm_plugin.start.plugin_settings import MAX_REQUEST_BYTES, PluginSettings
from tercet.wire.callers import Callers
from tercet.wire.client import StreamListener
from tercet.wire.serving.verb_routes import VerbServer
from tercet.wire.streams import router_connection
from tests.fuzz.fuzzing import Outcome, Target
from tests.fuzz.mutation import Case, Named
from tests.fuzz.verb_calls import ADDRESS, GETS, KEY, LEASE, VERBS, seeds
from tests.own_metrics import own_metrics
from tests.unit.fakes import LAYOUT
from tests.unit.vllm_plugin.tiny_engine import BLOCK, MAX_BATCHED, NO_ADAPTERS, TinyEngine

MAX_MODEL_LEN = 512
# Behind which nothing is: what does not answer is given up at once.
CONNECT_SECONDS = 0.2
CALL_SECONDS = 20.0
SETTLE_SECONDS = 20.0


class CoreEnded(BaseException):
    """vLLM's core cannot read what it was sent: its input thread, and with it the engine, is over."""


class TinyCore(EngineCoreClient, TinyEngine):
    """A core that is in this process; its steps run while there are requests, in a task."""

    def __init__(self, config: VllmConfig) -> None:
        TinyEngine.__init__(self, config)
        self.engine_ranks_managed = [0]
        self.resources: Any = type("Resources", (), {"engine_dead": False})()
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.reports: Any = None
        self.ended: list[BaseException] = []
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        self._stepping: asyncio.Task[None] | None = None

    # ---- what AsyncLLM and the verbs call ----------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        packed = self._encoder.encode(request)
        try:
            made = Request.from_engine_core_request(self._decoder.decode(packed), self.core.request_block_hasher)
            if made.use_structured_output:
                self.scheduler.structured_output_manager.grammar_init(made)
            self.scheduler.add_request(made)
        except Exception as error:
            self.ended.append(error)
            raise
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._step_all())

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        try:
            return await TinyEngine.call_utility_async(self, name, *args)
        except Exception as error:
            self.ended.append(error)
            raise

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...

    # ---- steps -------------------------------------------------------------------------------------------------------

    async def _step_all(self) -> None:
        try:
            while self.scheduler.has_requests():
                self._step_once()
                await asyncio.sleep(0)
        except Exception as error:
            self.ended.append(error)

    def _step_once(self) -> None:
        planned = self.scheduler.schedule()
        metadata = planned.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        grammar = self.scheduler.get_grammar_bitmask(planned)
        for made in self.scheduler.update_from_output(planned, self._sampled(planned, grammar)).values():
            self.outputs.put_nowait(made)
        for complete in metadata.finish:
            self.report(complete.send_id)

    def _sampled(self, planned: SchedulerOutput, grammar: Any) -> ModelRunnerOutput:
        ids = list(planned.num_scheduled_tokens)
        allowed: dict[str, int] = {}
        if grammar is not None:
            for row, request_id in enumerate(grammar.structured_output_request_ids):
                bits = [int(word) & 0xFFFFFFFF for word in grammar.grammar_bitmask[row]]
                first = next(index for index, word in enumerate(bits) if word)
                allowed[request_id] = 32 * first + (bits[first] & -bits[first]).bit_length() - 1
        done = [self.scheduler.requests[each] for each in ids]
        sampled = [
            [allowed.get(each.request_id, 700)] if each.num_computed_tokens >= each.num_tokens else [] for each in done
        ]
        return ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)

    def report(self, send_id: str) -> None:
        """As an agent does: every third send has failed."""
        failed = "refused" if len(send_id) and int(send_id[:2], 16) % 3 == 0 else None
        done = SendDone(send_id, 0, 64, 1, "tcp", failed)
        self.reports._take(msgspec.msgpack.encode(["SendDone", done]))

    def reported_cached(self) -> None:
        """Sends of what was cached are done as soon as they have begun."""
        pushed, self.agent.pushed = self.agent.pushed, []
        for command in pushed:
            self.report(command.plan.send_id)
        self.agent.cancelled.clear()


class VerbsRoom:
    """One engine; a case is some calls, one after the other or two at once. Afterwards nothing is held in it."""

    def __init__(
        self, core: TinyCore, engine: AttachedEngine, client: httpx.AsyncClient, router: tuple[str, str]
    ) -> None:
        self._core, self._engine, self._client, self._door = core, engine, client, router
        self._lease = "0" * 32

    async def run(self, case: Case) -> Outcome:
        answers: list[str] = []
        waiting: list[asyncio.Task[str]] = []
        for index, item in enumerate(case):
            waiting.append(asyncio.get_running_loop().create_task(self._call(item)))
            if index % 3:  # the next one comes while this one is under way
                answers += await asyncio.gather(*waiting)
                waiting.clear()
        answers += await asyncio.gather(*waiting)
        await self._give_back()
        return Outcome(len(case), " ".join(answers[:4]))

    async def _call(self, item: bytes) -> str:
        verb, _, body = item.partition(b" ")
        name = verb.decode("latin-1")
        if name not in VERBS:
            name = VERBS[len(item) % len(VERBS)]
        address, key = self._door
        for placeholder, value in ((LEASE, self._lease), (ADDRESS, address), (KEY, key)):
            body = body.replace(placeholder.encode(), value.encode())
        async with asyncio.timeout(CALL_SECONDS):
            method = "GET" if name in GETS else "POST"
            calling = asyncio.ensure_future(self._client.request(method, f"/{name}", content=body))
            while not calling.done():
                self._core.reported_cached()
                await asyncio.wait([calling], timeout=0.01)
            answer = await calling
        assert not self._core.ended, f"{name}: the core ended: {self._core.ended[0]!r}"
        assert answer.status_code != 500, f"{name}: {answer.text[:200]}"
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"]
            assert error["type"]
            return f"{name} {error['code']} {error['param']}"
        if name == "prep_recv":
            self._lease = answer.json()["kv_addr_info"]["lease"]
        return f"{name} {answer.status_code}"

    async def _give_back(self) -> None:
        edge = self._engine.edge
        for connection in list(self._engine.router_connections._connections.values()):
            connection.abort()
        for busy, _ in list(edge.work._stops):
            await edge.abort(busy)
        for lease in [held.name for held in edge.leases]:
            await edge.leases.release(lease)
        async with asyncio.timeout(SETTLE_SECONDS):
            while not self._is_empty():
                await asyncio.sleep(0.001)
        self._core.assert_nothing_held()
        self._core.agent.received.clear()

    def _is_empty(self) -> bool:
        self._core.reported_cached()
        status, engine = self._core.status(), self._engine
        held = (status["leases"], status["sends"], status["running"], status["waiting"], len(engine.edge.work))
        processor: Any = engine._client.output_processor
        return not any(held) and not processor.get_num_unfinished_requests() and not len(engine.router_connections)


def _config(directory: Path) -> VllmConfig:
    """Of the built-in model, whose weights nobody loads."""
    return VllmConfig(
        model_config=ModelConfig(model=resolve_model("smollm2", lambda _: None), dtype="float32",
                                 max_model_len=MAX_MODEL_LEN),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=MAX_BATCHED, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False,
            enable_chunked_prefill=True, async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="TercetConnector", kv_connector_module_path="tercet.vllm_plugin.connector", kv_role="kv_both"
        ),
    )  # fmt: skip


async def _counters() -> dict[str, int]:
    return {}


@asynccontextmanager
async def _room() -> AsyncGenerator[VerbsRoom]:
    with own_metrics():
        patience, router_connection.CONNECT_SECONDS = router_connection.CONNECT_SECONDS, CONNECT_SECONDS
        original = EngineCoreClient.make_async_mp_client
        with tempfile.TemporaryDirectory() as directory:
            config = _config(Path(directory))
            core = TinyCore(config)
            EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)  # type: ignore[method-assign]
            try:
                engine = AsyncLLM(config, executor_class=Executor, log_stats=True, log_requests=False)
            finally:
                EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]
        about = EngineDescription([["tcp://127.0.0.1:1"]], [], [], LAYOUT, core.connector.token, 60.0, 0.01, None)
        calls = CoreCalls(engine)
        probe = LivenessProbe(partial(calls.call, status), [_counters], [])
        await probe.start()
        generation = LLMGeneration(engine, about.token)
        edge = Edge("e", about, calls, generation, AgentCalls([core.agent]), NO_ADAPTERS, probe)
        attached = AttachedEngine(engine, edge, NO_ADAPTERS, MAX_REQUEST_BYTES)
        core.reports = edge.reports
        app = FastAPI()
        TercetEndpoints().attach_router(app)
        app.state.tercet = attached
        app.state.tercet_verbs = VerbServer(
            EdgeVerbs(edge), attached.router_connections, Callers([]), "", "", PluginSettings().max_request_bytes
        )
        app.state.tercet_prefillers = AllowedPrefillers("", "prefill_hosts")
        loads: list[EngineLoad] = []
        try:
            async with StreamListener() as listener:
                router = listener.connection_of("e", loads.append)
                address = await listener.address_for("http://127.0.0.1:1")
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(
                    transport=transport, base_url=f"http://localhost{API_PREFIX}", timeout=None
                ) as client:
                    yield VerbsRoom(core, attached, client, (address, router.key))
                attached.router_connections.close()
        finally:
            await probe.close()
            router_connection.CONNECT_SECONDS = patience
            edge.reports._task.cancel()
            with suppress(asyncio.CancelledError):
                await edge.reports._task
            edge.reports._socket.close()
            engine.shutdown()


TARGETS = (Target("verbs", seeds, Named(), _room, "calls"),)
