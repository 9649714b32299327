"""LoRA adapters of this engine: which it has by name, and whether their contents are still what they were.

Relies on ``OpenAIServingModels.lora_requests`` being what vLLM's own API finds adapters in, on its methods
``load_lora_adapter`` and ``unload_lora_adapter`` answering with an object that has an ``error`` where they refuse,
and on whatever loads an adapter while the server runs doing it by ``AsyncLLM.add_lora``.

vLLM names KV by an adapter's name and path. What is at the path may be other than it was, so here KV goes by a digest
of the files; and an adapter whose files are not what they were when it was met is served to nobody.

vLLM's ``load_inplace`` puts other weights under the number of an adapter that has requests: they go on with KV of the
old ones, and from then on each step reads the files again. So here nothing is replaced under a name that is in use.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from tercet.protocol import AdapterLoad, AdapterReport, BadRequest, Conflict, EngineError, Unauthorized, UnknownAdapter

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
    from vllm.v1.engine.async_llm import AsyncLLM

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.*", "new_embeddings.*")
# Who trained it on what, and where that lay, does not change what it computes.
IGNORED_KEYS = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "revision"})
ALLOWED_BY = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
READ_BYTES = 1 << 20
Stamp = tuple[tuple[str, int, int, int], ...]
Load = Callable[..., Awaitable[Any]]


class Adapter(msgspec.Struct, frozen=True):
    """An adapter as the core needs it: vLLM's name, number and path for it, and the digest of what is there."""

    name: str
    number: int
    path: str
    digest: str
    is_3d: bool = False

    def to_vllm(self) -> LoRARequest:
        """vLLM's own record of it: KV that is computed by either gets the same names."""
        return LoRARequest(self.name, self.number, self.path, is_3d_lora_weight=self.is_3d)


def digest_of(adapter: Adapter | None) -> str:
    """What an adapter's KV goes by; empty for the base model."""
    return "" if adapter is None else adapter.digest


@dataclass(frozen=True)
class _Contents:
    """What was found at a path: ``digest`` of its files, and ``stamp``, which changes when they do."""

    digest: str
    stamp: Stamp


class Adapters:
    """The adapters that vLLM's own API has, which ``models`` gives; ``most`` in one step, 0 if LoRA is off."""

    def __init__(self, models: Callable[[], OpenAIServingModels], most: int) -> None:
        self.most = most
        self._models = models
        self._met: dict[tuple[str, str], _Contents] = {}  # by name and path, as vLLM names KV
        self._reading, self._changing = asyncio.Lock(), asyncio.Lock()

    async def watch(self, client: AsyncLLM) -> None:
        """Know the contents of every adapter as vLLM loads it: of those that it has now, and of any that it will have.

        Read later, a digest could be of files that are not those which were loaded.
        """
        if self.most:
            models = self._models()
            models.load_lora_adapter = partial(self._load_in_place, models.load_lora_adapter)
        load = client.add_lora

        async def add_lora(lora_request: LoRARequest) -> bool:
            lora_request.load_inplace = False  # its number is new: what it would replace is nobody's
            key = lora_request.lora_name, lora_request.lora_path
            known = key in self._met
            with suppress(BadRequest):  # vLLM says it, too, and to whoever asked for it
                await self._contents(lora_request)
            try:
                return await load(lora_request)
            except BaseException:
                if not known:  # nothing was computed with it, so its files may be mended
                    self._met.pop(key, None)
                raise

        client.add_lora = add_lora
        await self.reports()

    async def _load_in_place(self, load: Load, request: LoadLoRAAdapterRequest, *base_model: Any, **named: Any) -> Any:
        """vLLM's own ``load``, which replaces no weights that requests run with: as :meth:`load`, and raises so."""
        if not request.load_inplace:
            return await load(request, *base_model, **named)
        async with self._changing:
            if request.lora_name not in self._known():
                return await load(request, *base_model, **named)
            await self._load(request.lora_name, request.lora_path)
            return f"Success: LoRA adapter '{request.lora_name}' has these contents already."

    async def find(self, name: str | None, digest: str = "") -> Adapter | None:
        """The adapter of that name; None for the base model. Any contents will do if no ``digest`` is wanted.

        Raises :class:`~tercet.protocol.UnknownAdapter`, also if it has other contents than those wanted, and
        :class:`~tercet.protocol.Conflict` if its files have changed.
        """
        if name is None:
            return None
        found = await self._named(name)
        AdapterReport(found.name, found.path, found.digest).require(digest)
        return found

    async def _named(self, name: str) -> Adapter:
        found = self._known().get(name)
        if found is None:
            raise self._unknown(name)
        return await self._met_as(found)

    def _unknown(self, name: str) -> UnknownAdapter:
        known = ", ".join(self._known()) or "none"
        why = f"it has {known}" if self.most else "it was started without --enable-lora"
        return UnknownAdapter(f"adapter: this engine has no adapter {name!r}; {why}", "adapter")

    async def reports(self) -> tuple[AdapterReport, ...]:
        """Those that can be served: of the others, whose files have changed or cannot be read, whoever asks is told."""
        found: list[AdapterReport] = []
        for name in list(self._known()):
            try:
                adapter = await self._named(name)
            except (UnknownAdapter, Conflict, BadRequest):
                continue
            found.append(AdapterReport(adapter.name, adapter.path, adapter.digest))
        return tuple(found)

    async def load(self, name: str, path: str) -> AdapterReport:
        """Have vLLM load an adapter; one that it has already under this name and path is left as it is.

        Raises :class:`~tercet.protocol.Unauthorized` unless vLLM's own variable allows it,
        :class:`~tercet.protocol.Conflict` for a name that is another one's, or other contents than before, and
        :class:`~tercet.protocol.BadRequest` for what vLLM cannot load.
        """
        self._require_allowed()
        if not self.most:
            raise BadRequest("adapter: this engine was started without --enable-lora", "adapter")
        async with self._changing:
            return await self._load(name, path)

    async def _load(self, name: str, path: str) -> AdapterReport:
        known = self._models().lora_requests.get(name)
        if known is not None and known.lora_path != path:
            raise Conflict(f"name: {name!r} is the adapter at {known.lora_path}; unload it first", "name")
        before = self._met.get((name, path))
        if before is not None:
            found = await asyncio.to_thread(_read, path)
            if found.digest != before.digest:
                raise _changed(name, path)
            self._met[name, path] = found
        if known is None:
            from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

            _require_done(
                await self._models().load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path))
            )
        adapter = await self._named(name)
        return AdapterReport(name, path, adapter.digest)

    async def unload(self, name: str) -> None:
        """No more requests for it, whatever its files are now; what runs with it goes on.

        Raises as :meth:`load` does, and ``UnknownAdapter``.
        """
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        if name not in self._known():
            raise self._unknown(name)
        self._require_allowed()
        _require_done(await self._models().unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)))

    def load_of(self, processor: Any) -> AdapterLoad | None:
        """Which adapters are used now, as vLLM's ``OutputProcessor`` knows; None if the engine serves none."""
        if not self.most:
            return None
        used = sorted(processor.lora_states.requests.items())
        running = tuple(name for name, stats in used if stats.running)
        waiting = tuple(name for name, stats in used if stats.waiting)
        known = sorted(f"{name} {each.lora_int_id} {each.lora_path}" for name, each in self._known().items())
        return AdapterLoad(running, waiting, self.most, zlib.crc32("\n".join(known).encode()))

    def _known(self) -> dict[str, LoRARequest]:
        return self._models().lora_requests if self.most else {}

    async def _met_as(self, request: LoRARequest) -> Adapter:
        name, path = request.lora_name, request.lora_path
        contents = await self._contents(request)
        if _stamp(contents.stamp) != contents.stamp:
            raise _changed(name, path)
        return Adapter(name, request.lora_int_id, path, contents.digest, request.is_3d_lora_weight)

    async def _contents(self, request: LoRARequest) -> _Contents:
        """What was found when an adapter of this name was first met at its path; that is now, if it was not yet."""
        key = request.lora_name, request.lora_path
        if key not in self._met:
            async with self._reading:
                if key not in self._met:
                    self._met[key] = await asyncio.to_thread(_read, request.lora_path)
        return self._met[key]

    @staticmethod
    def _require_allowed() -> None:
        if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            raise Unauthorized(
                f"adapter: this engine loads and unloads none while it runs; start it with {ALLOWED_BY}=1, or with "
                "--lora-modules NAME=PATH",
                "adapter",
            )


def _changed(name: str, path: str) -> Conflict:
    return Conflict(
        f"adapter: the files at {path} are not those that {name!r} was loaded from, and KV may be here that the old "
        "ones made; put them back, or load the new ones from another path",
        "adapter",
    )


def _require_done(answer: Any) -> None:
    error = getattr(answer, "error", None)
    if error is not None:
        kind = BadRequest if error.code in (400, 404) else EngineError
        raise kind(f"adapter: {error.message}", "adapter")


def _read(path: str) -> _Contents:
    """What is at an adapter's path, all of it: adapters are small. Raises ``BadRequest`` if that is none."""
    root = Path(get_adapter_absolute_path(path))
    files = [root / CONFIG, *sorted(file for pattern in WEIGHTS for file in root.glob(pattern))]
    digest = hashlib.blake2b(digest_size=16)
    try:
        stamp = _stamp(tuple((str(file), 0, 0, 0) for file in files))
        config: dict[str, Any] = json.loads(files[0].read_bytes())
        kept = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for file in files[1:]:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while part := opened.read(READ_BYTES):
                    digest.update(part)
    except (OSError, ValueError) as error:
        raise BadRequest(f"path: {path} has no adapter: {error}", "path") from error
    return _Contents(digest.hexdigest(), stamp)


def _stamp(of: Stamp) -> Stamp:
    """The files of a stamp as they are now; a file that is gone has none."""
    found: list[tuple[str, int, int, int]] = []
    for file, *_ in of:
        try:
            about = os.stat(file)
        except OSError:
            continue
        found.append((file, about.st_ino, about.st_mtime_ns, about.st_size))
    return tuple(found)
