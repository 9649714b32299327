"""Adapters of an engine: found by name, told apart by contents; and their KV, which vLLM names and nobody mixes up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.counter import AtomicCounter
from vllm.v1.request import Request

from tercet.engine.edge import check_adapter
from tercet.engine.interface import Adapter, KeyedPrompt, digest_of
from tercet.protocol import BadRequest, Conflict, KVAddrInfo, LayoutMismatch, RankAddress, Unauthorized, UnknownAdapter
from tercet.protocol.content import cache_key, content_of, packed
from tercet.protocol.wire import RemoteSendCall
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.edge.adapters import Adapters, _require_done, read_contents, to_lora_request
from tercet.vllm_plugin.worker.model_runner import leave_the_base_model_alone

from .tiny_engine import BLOCK, LAYOUT, NO_ADAPTERS, TinyEngine, tokens_of

A, B = (Adapter(name, number, f"/{name}", f"{number:032x}") for number, name in enumerate("ab", 1))


def write(directory: Path, weights: bytes = b"weights", **config: Any) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, **config}))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


class Models:
    """As much of vLLM's serving object as adapters need."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.refusal: str | None = None
        self._numbers = 0

    def put(self, name: str, path: str) -> None:
        self._numbers += 1
        self.lora_requests[name] = to_lora_request(Adapter(name, self._numbers, path, ""))

    async def load_lora_adapter(self, request: Any, base_model_name: str | None = None) -> Any:
        if self.refusal is not None:
            return SimpleNamespace(error=SimpleNamespace(code=400, message=self.refusal))
        self.put(request.lora_name, request.lora_path)
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> Any:
        del self.lora_requests[request.lora_name]
        return "Success"


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def adapters(models: Models, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    return Adapters(lambda: models, 2)  # type: ignore[arg-type,return-value]


# ---- finding -------------------------------------------------------------------------------------------------


async def test_the_base_model_is_no_adapter(adapters: Adapters) -> None:
    assert await adapters.find(None) is None
    assert await NO_ADAPTERS.find(None) is None


async def test_an_unknown_name_is_refused_and_those_that_there_are_are_named(
    adapters: Adapters, models: Models
) -> None:  # fmt: skip
    models.put("sql", "/sql")
    with pytest.raises(UnknownAdapter, match="it has sql"):
        await adapters.find("chat")
    with pytest.raises(UnknownAdapter, match="--enable-lora"):
        await NO_ADAPTERS.find("chat")


async def test_the_digest_is_of_the_contents_and_not_of_the_place(
    adapters: Adapters, models: Models, tmp_path: Path
) -> None:  # fmt: skip
    same = [write(tmp_path / "a", base_model_name_or_path="x"), write(tmp_path / "b", base_model_name_or_path="y")]
    others = [write(tmp_path / "c", b"Weights"), write(tmp_path / "d", lora_alpha=16)]
    for number, path in enumerate((*same, *others)):
        models.put(str(number), path)
    digests = [digest_of(await adapters.find(str(number))) for number in range(4)]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


async def test_files_that_change_under_an_adapter_are_nobodys(
    adapters: Adapters, models: Models, tmp_path: Path
) -> None:  # fmt: skip
    path = write(tmp_path / "a")
    models.put("a", path)
    assert len(await adapters.reports()) == 1
    write(tmp_path / "a", b"others!")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    with pytest.raises(Conflict, match="have changed since 'a' was loaded"):
        await adapters.find("a")
    assert await adapters.reports() == ()
    with pytest.raises(Conflict, match="unload it first"):
        await adapters.load("a", str(tmp_path / "b"))
    await adapters.unload("a")
    assert (await adapters.load("a", write(tmp_path / "b"))).name == "a"


async def test_what_has_no_adapter_in_it_is_refused(adapters: Adapters, models: Models, tmp_path: Path) -> None:
    models.put("a", str(tmp_path))
    with pytest.raises(BadRequest, match="has no adapter"):
        await adapters.find("a")
    assert await adapters.reports() == ()


@pytest.mark.parametrize("config", ["", "{", "[]"])
def test_an_adapter_without_a_valid_configuration_is_refused(config: str, tmp_path: Path) -> None:
    place = write(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(config)
    with pytest.raises(BadRequest, match="has no adapter"):
        read_contents(place)


def test_a_path_that_the_system_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="File name too long"):
        read_contents(str(tmp_path / ("a" * 300)))


async def test_who_wants_other_contents_is_refused(adapters: Adapters, models: Models, tmp_path: Path) -> None:
    models.put("a", write(tmp_path / "a"))
    found = await adapters.find("a")
    assert await adapters.find("a", digest_of(found)) == found
    models.put("a", write(tmp_path / "b", b"others"))
    with pytest.raises(UnknownAdapter, match="has the digest"):
        await adapters.find("a", digest_of(found))
    assert await adapters.find("a") != found


class Client:
    """As much of vLLM's client as loads adapters; ``before`` happens while it does. ``running`` are users of some."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before = before
        self.running = dict[str, Any]()

    @property
    def output_processor(self) -> Any:
        return SimpleNamespace(request_states=self.running)

    async def add_lora(self, lora_request: Any) -> bool:
        self.before()
        return True


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
async def test_contents_are_those_that_were_loaded_and_not_those_of_the_first_use(
    adapters: Adapters, models: Models, tmp_path: Path, when: str
) -> None:
    path, client = write(tmp_path / "a"), Client()
    if when == "at the start":
        models.put("a", path)
    await adapters.watch(client)  # type: ignore[arg-type]
    if when == "while it runs":
        await client.add_lora(to_lora_request(Adapter("a", 1, path, "")))
        models.put("a", path)
    write(tmp_path / "a", b"others, of another length")
    with pytest.raises(Conflict, match="have changed since 'a' was loaded"):
        await adapters.find("a")


async def test_files_that_change_while_vllm_reads_them_are_nobodys(
    adapters: Adapters, models: Models, tmp_path: Path
) -> None:
    path = write(tmp_path / "a")
    client = Client(lambda: write(tmp_path / "a", b"others, of another length"))
    await adapters.watch(client)  # type: ignore[arg-type]
    await client.add_lora(to_lora_request(Adapter("a", 1, path, "")))
    models.put("a", path)
    with pytest.raises(Conflict):
        await adapters.find("a")


class Loading(Models):
    """vLLM's way to load one through ``client``; ``loaded`` are the requests that it was asked with."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.loaded, self.lora_id_counter = Client(), list[Any](), AtomicCounter(0)

    async def load_lora_adapter(self, request: Any, base_model_name: str | None = None) -> Any:
        name, known = request.lora_name, self.lora_requests.get(request.lora_name)
        if known is not None and not request.load_inplace:
            return SimpleNamespace(error=SimpleNamespace(code=400, message=f"{name} has been loaded"))
        number = self.lora_id_counter.inc(1) if known is None else known.lora_int_id
        asked = LoRARequest(name, number, request.lora_path, load_inplace=request.load_inplace)
        await self.client.add_lora(asked)
        self.loaded.append(asked)
        self.lora_requests[name] = asked
        return "Success"

    def runs(self, *names: str) -> None:
        self.client.running = {name: SimpleNamespace(lora_name=name) for name in names}


@pytest.fixture
def loading() -> Loading:
    return Loading()


@pytest.fixture
async def watched(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    found = Adapters(lambda: loading, 2)  # type: ignore[arg-type,return-value]
    await found.watch(loading.client)  # type: ignore[arg-type]
    return found


def asked(name: str, path: str) -> LoadLoRAAdapterRequest:
    return LoadLoRAAdapterRequest(lora_name=name, lora_path=path, load_inplace=True)


@pytest.mark.parametrize("where", ["from another path", "from the same path"])
async def test_nothing_is_replaced_while_it_is_used(
    loading: Loading, watched: Adapters, tmp_path: Path, where: str
) -> None:  # fmt: skip
    path = write(tmp_path / "a")
    before = await watched.load("a", path)
    old = await watched.find("a")
    other = write(tmp_path / ("a" if "same" in where else "b"), b"others, of another length")
    loading.runs("b", "a")
    for replacing in (watched.replace("a", other), loading.load_lora_adapter(asked("a", other))):
        with pytest.raises(Conflict, match="in use"):
            await replacing
    loading.runs()
    leased = ["a"]
    watched.count_users(lambda: leased)
    with pytest.raises(Conflict, match="in use"):
        await watched.replace("a", other)
    assert len(loading.loaded) == 1
    leased.clear()
    loading.runs("b")
    after = await watched.replace("a", other)
    new = await watched.find("a", after.digest)
    assert after.digest != before.digest
    assert (after.name, after.path) == ("a", other)
    assert old is not None
    assert new is not None
    assert old.number != new.number, "what runs keeps the weights of its own number"
    assert old.path != new.path, "vLLM names KV by name and path"
    assert Path(new.path).samefile(other)
    with pytest.raises(UnknownAdapter, match="has the digest"):
        await watched.find("a", before.digest)


async def test_contents_that_come_back_find_the_kv_that_they_left(watched: Adapters, tmp_path: Path) -> None:
    path, names = write(tmp_path / "a"), list[Any]()
    for weights in (b"weights", b"2", b"3", b"weights", b"3"):
        write(tmp_path / "a", weights)
        await watched.replace("a", path)
        found = await watched.find("a")
        names.append(found and (found.path, found.digest))
    assert names[0] == names[3]
    assert names[2] == names[4]
    assert len({*names}) == len({path for path, _ in names}) == len({digest for _, digest in names}) == 3


async def test_what_is_loaded_in_place_is_not_read_again_by_each_step(
    loading: Loading, watched: Adapters, tmp_path: Path
) -> None:
    """The flag would stay with every request for it."""
    await loading.load_lora_adapter(asked("a", write(tmp_path / "a")))
    loading.runs("a")
    assert "already" in await loading.load_lora_adapter(asked("a", write(tmp_path / "a")))
    loading.runs()
    await loading.load_lora_adapter(asked("a", write(tmp_path / "b", b"others")))
    assert [each.load_inplace for each in loading.loaded] == [False, False]


async def test_what_was_unloaded_is_loaded_anew_with_other_contents(
    loading: Loading, watched: Adapters, tmp_path: Path
) -> None:
    path = write(tmp_path / "a")
    before = await watched.load("a", path)
    await watched.unload("a")
    write(tmp_path / "a", b"others, of another length")
    loading.runs("a")  # it goes on, and may have its weights read again from there
    with pytest.raises(Conflict, match="in use"):
        await watched.load("a", path)
    loading.runs()
    after = await watched.load("a", path)
    assert (after.path, await watched.load("a", path)) == (path, after)
    assert after.digest != before.digest
    with pytest.raises(BadRequest, match="has been loaded"):
        _require_done(await loading.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="a", lora_path=path)))


async def test_what_cannot_be_loaded_replaces_nothing(loading: Loading, watched: Adapters, tmp_path: Path) -> None:
    before = await watched.load("a", write(tmp_path / "a"))
    other = write(tmp_path / "b", b"others")

    def refuse() -> None:
        raise ValueError("its rank is too large")

    loading.client.before = refuse
    with pytest.raises(ValueError, match="rank"):
        await watched.replace("a", other)
    assert await watched.reports() == (before,)
    loading.client.before = lambda: None
    write(tmp_path / "b", b"mended, of another length")
    assert (await watched.replace("a", other)).path == other


async def test_what_is_no_adapter_is_vllms_to_refuse(adapters: Adapters, tmp_path: Path) -> None:
    client = Client()
    await adapters.watch(client)  # type: ignore[arg-type]
    assert await client.add_lora(to_lora_request(Adapter("a", 1, str(tmp_path), "")))


async def test_files_that_vllm_could_not_load_may_be_mended(adapters: Adapters, models: Models, tmp_path: Path) -> None:
    path, refusals = write(tmp_path / "a"), ["its rank is too large"]

    def refuse() -> None:
        if refusals:
            raise ValueError(refusals.pop())

    client = Client(refuse)
    await adapters.watch(client)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank"):
        await client.add_lora(to_lora_request(Adapter("a", 1, path, "")))
    write(tmp_path / "a", b"others, of another length")
    await client.add_lora(to_lora_request(Adapter("a", 2, path, "")))
    models.put("a", path)
    assert await adapters.find("a")


# ---- loading and unloading -----------------------------------------------------------------------------------


async def test_an_adapter_is_loaded_once_and_unloaded(adapters: Adapters, models: Models, tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    report = await adapters.load("a", path)
    assert await adapters.load("a", path) == report
    assert models.lora_requests["a"].lora_int_id == 1
    with pytest.raises(Conflict, match="unload it first"):
        await adapters.load("a", write(tmp_path / "b"))
    await adapters.unload("a")
    with pytest.raises(UnknownAdapter):
        await adapters.unload("a")


async def test_what_vllm_refuses_is_refused(adapters: Adapters, models: Models, tmp_path: Path) -> None:
    models.refusal = "its rank is too large"
    with pytest.raises(BadRequest, match="its rank is too large"):
        await adapters.load("a", write(tmp_path))
    with pytest.raises(BadRequest, match="--enable-lora"):
        await NO_ADAPTERS.load("a", write(tmp_path))


async def test_loading_is_vllms_to_allow(
    adapters: Adapters, models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    models.put("a", str(tmp_path))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")
    for changing in (adapters.load("a", write(tmp_path)), adapters.unload("a")):
        with pytest.raises(Unauthorized, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            await changing


def test_load_says_who_uses_what(adapters: Adapters, models: Models) -> None:
    stats = {"a": SimpleNamespace(running={"1"}, waiting={"2"}), "b": SimpleNamespace(running=set(), waiting={"3"})}
    processor = SimpleNamespace(lora_states=SimpleNamespace(requests=stats))
    found = adapters.load_of(processor)
    assert found is not None
    assert (found.running, found.waiting, found.max) == (("a",), ("a", "b"), 2)
    models.put("a", "/a")
    later = adapters.load_of(processor)
    assert later is not None
    assert later.stamp != found.stamp
    assert NO_ADAPTERS.load_of(processor) is None


# ---- whose KV it is ------------------------------------------------------------------------------------------


def test_a_key_stands_for_one_salt_and_one_adapter() -> None:
    """Nobody reaches an adapter's KV by a salt that looks like it."""
    salts = [None, "s", "\0", "\0a", cache_key(None, A.digest), cache_key("s", A.digest)]
    keys = [cache_key(salt, digest_of(adapter)) for salt in salts for adapter in (None, A, B)]
    assert len({*keys}) == len(keys)
    assert cache_key("", A.digest) == cache_key(None, A.digest)
    assert cache_key("plain") == "plain"


def adopt(engine: TinyEngine, request_id: str, tokens: list[int], adapter: Adapter | None) -> Request:
    """A request as vLLM makes it, with its own record of the adapter."""
    return Request(
        request_id=request_id, prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None, lora_request=None if adapter is None else to_lora_request(adapter),
        block_hasher=engine.core.request_block_hasher,
    )  # fmt: skip


@pytest.mark.parametrize("of", [None, A])
@pytest.mark.parametrize("wanted", [None, A, B])
async def test_kv_is_found_by_its_own_adapter_alone(
    engine: TinyEngine, of: Adapter | None, wanted: Adapter | None
) -> None:
    """vLLM's own hashes name what arrived under a lease: a request finds it, and no other adapter's."""
    lease, tokens = "f" * 32, tokens_of(2 * BLOCK)
    reserved = core_methods.reserve(engine.core, lease, KeyedPrompt(tokens, adapter=of)).result(0)
    assert reserved.matched_len == 0
    core_methods.commit(engine.core, lease, content_of(packed(tokens), cache_key(None, digest_of(of)), len(tokens)))
    core_methods.release(engine.core, lease, len(tokens))
    request = adopt(engine, "r", tokens_of(2 * BLOCK + 5), wanted)
    _, matched, _ = engine.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert matched == (2 * BLOCK if of == wanted else 0)


async def test_kv_of_another_adapter_is_not_committed(engine: TinyEngine) -> None:
    lease, tokens = "f" * 32, tokens_of(BLOCK)
    core_methods.reserve(engine.core, lease, KeyedPrompt(tokens, adapter=A)).result(0)
    for wrong in (None, B):
        content = content_of(packed(tokens), cache_key(None, digest_of(wrong)), len(tokens))
        with pytest.raises(core_methods.EngineError, match="other tokens"):
            core_methods.commit(engine.core, lease, content)
    with pytest.raises(BadRequest):
        core_methods.extend(engine.core, lease, KeyedPrompt(tokens_of(2 * BLOCK), adapter=B))
    core_methods.release(engine.core, lease, 0)


def test_kv_goes_to_the_same_contents_only() -> None:
    info = KVAddrInfo("f" * 32, "d", 0, 16, "tcp", (RankAddress(0, ("tcp://127.0.0.1:1",)),), LAYOUT, adapter=A.digest)
    call = RemoteSendCall(prompt=[1] * 16, kv_addr_info=info, begin=0, seq_id="s", adapter="a")
    check_adapter(call, A.digest)
    with pytest.raises(LayoutMismatch, match="has the digest"):
        check_adapter(call, B.digest)
    with pytest.raises(BadRequest, match="was for an adapter"):
        check_adapter(call, "")


@pytest.mark.parametrize("indices", [[-1, 0, 1, -1], [-1, -1], [1, 0]])
def test_rows_of_the_base_model_get_no_adapter_on_a_cpu(indices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's own operators: a row with an adapter gets its product, one without gets what it had."""
    for module in (lora_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", lora_ops.bgmv_shrink)
        monkeypatch.setattr(module, "bgmv_expand", lora_ops.bgmv_expand)
    leave_the_base_model_alone()
    torch.manual_seed(0)
    rows, hidden, rank = len(indices), 6, 2
    inputs, down, up = torch.randn(rows, hidden), torch.randn(2, 1, rank, hidden), torch.randn(2, 1, hidden, rank)
    in_a_wrapper: Any = vars(punica_cpu)["bgmv_shrink"]
    for decodes in (True, False):
        buffer, output = torch.zeros(rows, rank), torch.ones(rows, hidden)
        where, lengths = torch.tensor(indices), torch.ones(rows, dtype=torch.long)
        if decodes:
            in_a_wrapper(inputs, down, buffer, where, 1.0)
        else:
            lora_ops.sgmv_shrink(inputs, down, buffer, lengths, lengths, where, rows, 1, rows, 1.0)
        lora_ops.bgmv_expand(buffer, up, output, where, True)
        for row, index in enumerate(indices):
            added = up[index, 0] @ down[index, 0] @ inputs[row] if index >= 0 else torch.zeros(hidden)
            assert torch.allclose(output[row], 1 + added, atol=1e-5)


@pytest.mark.parametrize("decodes", [True, False])
def test_embeddings_of_the_base_model_get_no_adapter_on_a_cpu(decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks a row of the first adapter's up for them, and multiplies it by what the last one has."""
    for module in (lora_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", lora_ops.bgmv_shrink)
        monkeypatch.setattr(module, "bgmv_expand", lora_ops.bgmv_expand)
    leave_the_base_model_alone()
    torch.manual_seed(0)
    looked_up, up, output = torch.randn(2, 3), torch.randn(2, 1, 6, 3), torch.ones(2, 6)
    where, lengths = torch.tensor([-1, 1]), torch.ones(2, dtype=torch.long)
    in_a_wrapper: Any = vars(punica_cpu)
    if decodes:
        in_a_wrapper["bgmv_expand"](looked_up, up, output, where, True)
    else:
        in_a_wrapper["sgmv_expand"](looked_up, up, output, lengths, lengths, where, 2, 1, 2, True)
    assert torch.equal(output[0], torch.ones(6))
    assert torch.allclose(output[1], 1 + up[1, 0] @ looked_up[1], atol=1e-5)
