"""LoRA adapters of this engine, by name, and whether their contents are unchanged.

Relies on ``OpenAIServingModels.lora_requests`` being the table in which vLLM's own API finds adapters, on its methods
``load_lora_adapter`` and ``unload_lora_adapter`` answering with an object that has an ``error`` if they refuse, on its
``lora_id_counter`` giving numbers that no adapter has had, on adapters being loaded at run time only by
``AsyncLLM.add_lora``, and on ``OutputProcessor.request_states`` containing all requests that have not ended.

vLLM names KV by an adapter's name and path. The contents at the path may change, so here KV is named by a digest of the
files, other contents get another path (:mod:`~tercet.vllm_plugin.edge.adapters`), and an adapter whose files
have changed since it was loaded is not served.

vLLM's ``load_inplace`` puts other weights under the number of an adapter that has requests: they continue with KV of
the old weights, and from then on each step reads the files again. So here an adapter that is loaded in place gets a new
number, and its old contents are not replaced while they are in use.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from tercet.aio.files import stamp_of
from tercet.engine.interface import Adapter
from tercet.protocol import AdapterLoad, AdapterReport, BadRequest, Conflict, EngineError, Unauthorized, UnknownAdapter

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
    from vllm.v1.engine.async_llm import AsyncLLM


CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.*", "new_embeddings.*")
# The training data and the base model's path do not change what an adapter computes.
IGNORED_KEYS = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "revision"})
READ_BYTES = 1 << 20
HERE = "/."
Stamp = tuple[tuple[Path, object], ...]


@dataclass(frozen=True)
class Contents:
    """The contents of the directory ``root``: ``digest`` of its files, and ``stamp``, which changes with the files."""

    root: str
    digest: str
    stamp: Stamp


def read_contents(path: str) -> Contents:
    """Read all files at an adapter's path: adapters are small. Raises ``BadRequest`` if there is no adapter."""
    root = Path(get_adapter_absolute_path(path))
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = [root / CONFIG, *sorted(file for pattern in WEIGHTS for file in root.glob(pattern))]
        stamp = _stamp(files)
        config: Any = json.loads(files[0].read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} is not a JSON object")
        kept = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for file in files[1:]:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while part := opened.read(READ_BYTES):
                    digest.update(part)
    except (OSError, ValueError) as error:
        raise BadRequest(f"path: {path} has no adapter: {error}", "path") from error
    return Contents(str(root), digest.hexdigest(), stamp)


def _stamp(files: Iterable[Path]) -> Stamp:
    return tuple((file, stamp_of(file)) for file in files)


ALLOWED_BY = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
Load = Callable[..., Awaitable[Any]]


def to_lora_request(adapter: Adapter) -> LoRARequest:
    """Return vLLM's record of an adapter. KV has the same names with either record."""
    return LoRARequest(adapter.name, adapter.number, adapter.path, is_3d_lora_weight=adapter.is_3d)


class Adapters:
    """The adapters of vLLM's own API, which ``models`` returns; at most ``most`` in one step, 0 if LoRA is off."""

    def __init__(self, models: Callable[[], OpenAIServingModels], most: int) -> None:
        self.most = most
        self._models = models
        self._vllms_load: Load | None = None
        self._met: dict[tuple[str, str], Contents] = {}  # by name and path, as vLLM names KV
        self._given: dict[str, str] = {}  # callers' spelling of a path that is spelled differently here
        self._users: list[Callable[[], Iterable[str | None]]] = []
        self._reading, self._changing = asyncio.Lock(), asyncio.Lock()

    def count_users(self, names: Callable[[], Iterable[str | None]]) -> None:
        """Register ``names``, which returns the names of adapters in use: their contents are not replaced."""
        self._users.append(names)

    async def watch(self, client: AsyncLLM) -> None:
        """Read the contents of every adapter when vLLM loads it: later, they could be those of other files."""
        self.count_users(lambda: [each.lora_name for each in client.output_processor.request_states.values()])
        if self.most:
            models = self._models()
            self._vllms_load = models.load_lora_adapter
            models.load_lora_adapter = self._load_by_vllms_api
        load = client.add_lora

        async def add_lora(lora_request: LoRARequest) -> bool:
            # Another number for other weights: running requests keep those of their number, and are not changed under
            # way.
            if lora_request.load_inplace:
                lora_request.load_inplace = False
                lora_request.lora_int_id = self._models().lora_id_counter.inc(1)
            key = lora_request.lora_name, lora_request.lora_path
            known = key in self._met
            with suppress(BadRequest):  # vLLM reports it, too, to the caller
                await self._contents(lora_request)
            try:
                return await load(lora_request)
            except BaseException:
                if not known:  # nothing was computed with the adapter, so its files may be corrected
                    self._met.pop(key, None)
                raise

        client.add_lora = add_lora
        await self.reports()

    async def _load_by_vllms_api(
        self, request: LoadLoRAAdapterRequest, base_model_name: str | None = None
    ) -> Any:  # fmt: skip
        """Replace vLLM's method. Raises :class:`~tercet.protocol.Conflict` if contents in use would be replaced."""
        async with self._changing:
            return await self._load_by_vllm(request, base_model_name)

    async def _load_by_vllm(self, request: LoadLoRAAdapterRequest, base_model_name: str | None = None) -> Any:
        name, path = request.lora_name, request.lora_path
        known, load = self._known().get(name), self._vllms_load or self._models().load_lora_adapter
        try:
            found = await asyncio.to_thread(read_contents, path)
        except BadRequest:
            found = None
        if found is None or (known is not None and not request.load_inplace):
            return await load(request, base_model_name)  # vLLM refuses it
        if known is not None and self._path_of(known) == path and self._still_there(known, found):
            return f"Success: LoRA adapter '{name}' has these contents already."
        # vLLM names KV by an adapter's name and path. If other contents were at this path before, another spelling of
        # the same directory keeps their KV apart from that of these.
        spelled, root = path, found.root
        while (met := self._met.get((name, spelled))) is not None and met.digest != found.digest:
            spelled = root = root + HERE
        if met is not None:
            self._met[name, spelled] = found
        self._given[spelled] = path
        if (known is not None or spelled != path) and any(name in names() for names in self._users):
            raise Conflict(
                f"name: {name!r} is in use, and its requests keep its weights; retry when "
                "no request uses it, or load the new ones under another name",
                "name",
            )
        return await load(request.model_copy(update={"lora_path": spelled}), base_model_name)

    def _still_there(self, known: LoRARequest, found: Contents) -> bool:
        """True if the contents ``found`` at an adapter's path are those that it was loaded from."""
        key = known.lora_name, known.lora_path
        met = self._met.get(key)
        if met is None or met.digest != found.digest:
            return False
        self._met[key] = found
        return True

    def _path_of(self, known: LoRARequest) -> str:
        return self._given.get(known.lora_path, known.lora_path)

    async def find(self, name: str | None, digest: str = "") -> Adapter | None:
        if name is None:
            return None
        found = await self._named(name)
        AdapterReport(found.name, found.path, found.digest).require(digest)
        return found

    async def _named(self, name: str) -> Adapter:
        found = self._known().get(name)
        if found is None:
            raise self._unknown(name)
        name, path = found.lora_name, found.lora_path
        contents = await self._contents(found)
        # Its KV on other engines is found by the digest of files that are not these any more.
        if _stamp(file for file, _ in contents.stamp) != contents.stamp:
            raise _changed(name, self._path_of(found))
        return Adapter(name, found.lora_int_id, path, contents.digest, found.is_3d_lora_weight)

    def _unknown(self, name: str) -> UnknownAdapter:
        known = ", ".join(self._known()) or "none"
        why = f"it has {known}" if self.most else "it was started without --enable-lora"
        return UnknownAdapter(f"adapter: this engine has no adapter {name!r}; {why}", "adapter")

    async def reports(self) -> tuple[AdapterReport, ...]:
        """Leave out adapters that have changed files, or cannot be read: their users get an error."""
        found: list[AdapterReport] = []
        for name in list(self._known()):
            with suppress(UnknownAdapter, Conflict, BadRequest):
                found.append(await self._reported(name))
        return tuple(found)

    async def load(self, name: str, path: str) -> AdapterReport:
        """Make vLLM load an adapter; do nothing if the same adapter is already loaded.

        Raises :class:`~tercet.protocol.Unauthorized` unless vLLM's own variable allows it,
        :class:`~tercet.protocol.Conflict` for a name in use or for changed contents, and
        :class:`~tercet.protocol.BadRequest` for files that vLLM cannot load.
        """
        self._require_loading()
        async with self._changing:
            known = self._known().get(name)
            if known is None:
                await self._asked_of_vllm(name, path)
            elif self._path_of(known) != path:
                raise Conflict(f"name: {name!r} is the adapter at {self._path_of(known)}; unload it first", "name")
            elif not self._still_there(known, await asyncio.to_thread(read_contents, path)):
                raise _changed(name, path)
            return await self._reported(name)

    async def replace(self, name: str, path: str) -> AdapterReport:
        """Use a name for the contents of ``path`` from now on. Raises as :meth:`load` does, then nothing changes."""
        self._require_loading()
        async with self._changing:
            await self._asked_of_vllm(name, path, load_inplace=True)
            return await self._reported(name)

    async def _asked_of_vllm(self, name: str, path: str, **how: bool) -> None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        _require_done(await self._load_by_vllm(LoadLoRAAdapterRequest(lora_name=name, lora_path=path, **how)))

    async def _reported(self, name: str) -> AdapterReport:
        adapter = await self._named(name)
        return AdapterReport(name, self._given.get(adapter.path, adapter.path), adapter.digest)

    async def unload(self, name: str) -> None:
        """Accept no more requests for the adapter; running requests continue. Raises as :meth:`load` does."""
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        if name not in self._known():
            raise self._unknown(name)
        self._require_allowed()
        _require_done(await self._models().unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)))

    def load_of(self, processor: Any) -> AdapterLoad | None:
        """Return the adapters in use now, from vLLM's ``OutputProcessor``; None if the engine serves no adapters."""
        if not self.most:
            return None
        used = sorted(processor.lora_states.requests.items())
        running = tuple(name for name, stats in used if stats.running)
        waiting = tuple(name for name, stats in used if stats.waiting)
        known = sorted(f"{name} {each.lora_int_id} {each.lora_path}" for name, each in self._known().items())
        return AdapterLoad(running, waiting, self.most, zlib.crc32("\n".join(known).encode()))

    def _known(self) -> dict[str, LoRARequest]:
        return self._models().lora_requests if self.most else {}

    async def _contents(self, request: LoRARequest) -> Contents:
        """Return the contents that an adapter of this name had when it was first used at its path, which may be now."""
        key = request.lora_name, request.lora_path
        if key not in self._met:
            async with self._reading:
                if key not in self._met:
                    self._met[key] = await asyncio.to_thread(read_contents, request.lora_path)
        return self._met[key]

    def _require_loading(self) -> None:
        self._require_allowed()
        if not self.most:
            raise BadRequest("adapter: this engine was started without --enable-lora", "adapter")

    @staticmethod
    def _require_allowed() -> None:
        if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            raise Unauthorized(
                "adapter: this engine does not load or unload adapters while it runs; start it with "
                f"{ALLOWED_BY}=1, or with --lora-modules NAME=PATH",
                "adapter",
            )


def _changed(name: str, path: str) -> Conflict:
    return Conflict(
        f"adapter: the files at {path} have changed since {name!r} was loaded; restore them, or load the new "
        "ones in place, once no request uses it",
        "adapter",
    )


def _require_done(answer: Any) -> None:
    error = getattr(answer, "error", None)
    if error is not None:
        kind = BadRequest if error.code in (400, 404) else EngineError
        raise kind(f"adapter: {error.message}", "adapter")
