"""The client of an engine without Tercet's plugin, for an endpoint picker: its load is read from ``/metrics``."""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import aiohttp

from tercet.aio.tasks import TaskSet, repeat
from tercet.fleet import EngineFleet
from tercet.fleet.kv_events import cache_followed
from tercet.fleet.membership import Connect, restarts_of
from tercet.protocol import (
    Conflict,
    Engine,
    EngineLoad,
    EngineStatus,
    EngineUnreachable,
    KVEvents,
    OutputStream,
    Request,
    Reservation,
    Sent,
)
from tercet.protocol.names import bracketed
from tercet.wire.client import Admit
from tercet.wire.client.bounded_answers import PLAIN, read_answer, reason_of

TOGETHER_SECONDS = 2.0
"""Timeout of one reading, in seconds; after it the engine counts as not answering."""
# Seconds until an idle connection is closed: less than the 5 s of vLLM.
KEEPALIVE_SECONDS = 4.0


class ScrapedEngine:
    """A reader of the page of the engine at ``url``, every ``interval`` seconds while entered.

    ``on_load`` receives each reading; ``on_new`` is called when the process behind the page was replaced. ``kv_events``
    is the address of the engine's events, if it publishes them. The verbs are not available: only Tercet's plugin has
    them.
    """

    def __init__(
        self,
        name: str,
        url: str,
        interval: float,
        on_load: Callable[[EngineLoad], None],
        on_new: Callable[[], object],
        tls: ssl.SSLContext | None = None,
        kv_events: KVEvents | None = None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._interval = interval
        self._on_load = on_load
        self._on_new = on_new
        self._tls = tls
        self._kv_events = kv_events
        self._started = ""
        self._tasks = TaskSet()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ScrapedEngine:
        connector = aiohttp.TCPConnector(keepalive_timeout=KEEPALIVE_SECONDS, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=PLAIN,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=TOGETHER_SECONDS),
        )
        name = f"metrics of {self.name}"
        self._tasks.spawn(repeat(self._read_on, self._interval, name), name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        if self._session is not None:
            await self._session.close()

    async def status(self) -> EngineStatus:
        """Return the status from a new reading."""
        found = await self._reading()
        return EngineStatus(
            engine=self.name,
            model=found.model,
            version="",
            vllm_version="",
            block_size=found.block_size,
            total_blocks=found.total_blocks,
            free_blocks=round((1 - min(1.0, found.kv_usage)) * found.total_blocks),
            running=found.running,
            waiting=found.waiting,
            kv_cache_usage=found.kv_usage,
            max_model_len=0,
            leases=0,
            sends=0,
            kv_events=self._kv_events,
            incarnation=found.started,
        )

    async def _read_on(self) -> None:
        with suppress(EngineUnreachable):  # the fleet's watch polls engines without reports, and logs the reason
            await self._reading()

    async def _reading(self) -> VllmMetrics:
        assert self._session is not None
        try:
            async with self._session.get(f"{self.url}/metrics", allow_redirects=False) as answer:
                page = await read_answer(answer)
                if answer.status != 200:
                    raise EngineUnreachable(f"{self.name}: its /metrics answers with HTTP {answer.status}")
            found = parsed(page.decode())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"{self.name}: its /metrics does not answer: {reason_of(error)}") from error
        except ValueError as error:
            raise EngineUnreachable(f"{self.name}: {error}") from error
        if self._started and found.started != self._started:
            self._on_new()
        self._started = found.started
        self._on_load(EngineLoad(waiting=found.waiting, running=found.running, kv_usage=found.kv_usage))
        return found

    # ---- missing verbs --------------------------------------------------------------------------------------

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        raise self._without_verbs()

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        raise self._without_verbs()

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        raise self._without_verbs()

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        raise self._without_verbs()

    def _without_verbs(self) -> Conflict:
        return Conflict(f"{self.name} has no verbs: it is read from /metrics, as an engine without Tercet's plugin")


WAITING, RUNNING, USAGE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
OLD_USAGE, CONFIG, STARTED = "vllm:gpu_cache_usage_perc", "vllm:cache_config_info", "process_start_time_seconds"
# This finds a few lines of a page of thousands without parsing the others.
_WANTED = re.compile(
    "^({})(?:{{(.*)}})? (\\S+)$".format("|".join((WAITING, RUNNING, USAGE, OLD_USAGE, CONFIG, STARTED))), re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class VllmMetrics:
    """One reading. Data parallel ranks behind one page count as one engine: requests are summed, usage is the mean.

    If the page lacks them, ``block_size`` and ``total_blocks`` are 0, and ``started`` is empty.
    """

    waiting: int
    running: int
    kv_usage: float
    model: str
    block_size: int = 0
    total_blocks: int = 0
    started: str = ""


def parsed(page: str) -> VllmMetrics:
    """Parse a page. Raises ``ValueError`` if the page is not vLLM's."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    started = ""
    for name, labels, value in _WANTED.findall(page):
        if name == STARTED:
            started = value
        number = float(value)
        if math.isfinite(number):
            found.setdefault(name, []).append((dict(_LABEL.findall(labels)), number))
    usage = found.get(USAGE) or found.get(OLD_USAGE)
    if WAITING not in found or RUNNING not in found or not usage:
        raise ValueError(f"its /metrics page lacks {WAITING}, {RUNNING} or {USAGE}")
    waiting, running = (max(0, round(sum(value for _, value in found[name]))) for name in (WAITING, RUNNING))
    configs = [labels for labels, _ in found.get(CONFIG, ())]
    return VllmMetrics(
        waiting,
        running,
        max(0.0, sum(value for _, value in usage) / len(usage)),
        found[WAITING][0][0].get("model_name", ""),
        max((_whole(labels.get("block_size")) for labels in configs), default=0),
        sum(_whole(labels.get("num_gpu_blocks")) for labels in configs),
        started,
    )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def scraping(
    fleet: EngineFleet, interval: float, kv_events_port: int | None = None, tls: ssl.SSLContext | None = None
) -> Connect:
    """Return a function that connects to an engine and reads its ``/metrics`` every ``interval`` seconds.

    With ``kv_events_port`` each engine publishes vLLM's KV events on this port of its host. ``tls`` is that of
    :class:`~tercet.wire.client.HttpEngine`. The page needs no key on any vLLM server, so none is sent.
    """

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[Engine]:
        restarted, note_restart = restarts_of(fleet, name)
        host = bracketed(urlsplit(url).hostname or "127.0.0.1")
        events = None if kv_events_port is None else KVEvents(f"tcp://{host}:{kv_events_port}")
        reported = partial(fleet.report, name)
        async with (
            ScrapedEngine(name, url, interval, reported, note_restart, tls, events) as engine,
            cache_followed(name, url, engine, fleet.knowledge, restarted),
        ):
            yield engine

    return connect
