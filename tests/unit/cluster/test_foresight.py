"""What is known before an engine starts: that its model is nowhere, and that memory or cores will not do."""

from __future__ import annotations

import http.server
import json
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet.cluster.engine_command import GIB, EngineSpec, require_memory, shared_cores
from tercet.cluster.local import local_fleet
from tercet.cluster.model import cached_snapshot, require_model
from tercet.cluster.ports import free_ports
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tests.servers import served_in_thread


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "VLLM_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has `org/known`, hides `org/hidden` and is broken for `org/broken`; what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            codes = {"/api/models/org/known": 200, "/api/models/org/hidden": 401, "/api/models/org/broken": 503}
            self.send_response(codes.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with served_in_thread(server) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/")
        yield asked


def checkpoint(at: Path, weights: int = 0, **description: object) -> Path:
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(description))
    with (at / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    return at


def in_cache(tmp_path: Path, name: str, weights: int = 0) -> Path:
    return checkpoint(
        tmp_path / "hub-home" / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "abc", weights
    )


def test_a_checkpoint_here_or_in_the_cache_is_found_without_asking_anybody(tmp_path: Path, hub: list[str]) -> None:
    require_model(str(checkpoint(tmp_path / "mine")))
    found = in_cache(tmp_path, "org/cached")
    require_model("org/cached")
    assert cached_snapshot("org/cached") == found
    require_model("s3://bucket/model")  # vLLM's to understand
    assert hub == []


def test_a_cached_checkpoint_may_have_a_description_of_mistrals(tmp_path: Path, hub: list[str]) -> None:
    found = in_cache(tmp_path, "org/params")
    (found / "config.json").rename(found / "params.json")
    require_model("org/params")
    assert hub == []


@pytest.mark.slow
@pytest.mark.parametrize("token", ["hf_secret\n", "hf_sec\nret"])
def test_a_line_end_in_a_token_is_left_out(token: str, monkeypatch: pytest.MonkeyPatch, hub: list[str]) -> None:
    """In the header it would be refused, with a complaint that says the token."""
    monkeypatch.setenv("HF_TOKEN", token)
    require_model("org/known")
    assert hub == ["/api/models/org/known"]


def test_a_server_that_speaks_no_http_is_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BadRequest, match="does not answer"):
            require_model("org/known")


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequest, match=r"empty is not a checkpoint: it has no config\.json"):
        require_model(str(tmp_path / "empty"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["org/known", "org/broken"])
def test_what_the_hub_has_or_cannot_tell_is_left_to_vllm(name: str, hub: list[str]) -> None:
    require_model(name)
    assert hub == [f"/api/models/{name}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2", "did you mean smollm2?"),
        ("org/cachd", "did you mean org/cached?"),
        ("org/hidden", "or shows it only with HF_TOKEN"),
        ("a/b/c", "not a valid name of a model hub"),
        ("zzz", "the built-in one is smollm2"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_with_what_was_meant(
    name: str, said: str, hub: list[str], tmp_path: Path
) -> None:
    in_cache(tmp_path, "org/cached")
    with pytest.raises(BadRequest) as refused:
        require_model(name)
    assert refused.value.message.startswith(f"model: there is no '{name}': ")
    assert said in refused.value.message
    assert refused.value.param == "model"


def test_without_a_hub_only_what_is_here_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(BadRequest, match=r"does not answer \(.*refused"):
        require_model("org/known")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadRequest, match="HF_HUB_OFFLINE is set"):
        require_model("org/known")


# ---- memory and cores ----------------------------------------------------------------------------------------------


def spec(model: Path, *extra_args: str, cores: tuple[int, ...] = (0,), kv: int = 2, dtype: str = "") -> EngineSpec:
    return EngineSpec(
        name="e", model=str(model), served_model_name="m", host="127.0.0.1", port=1, cores=cores, kv_cache_gib=kv,
        dtype=dtype or None, extra_args=extra_args,
    )  # fmt: skip


def test_engines_without_needs_of_their_own_always_fit(tmp_path: Path) -> None:
    require_memory([spec(tmp_path, cores=())], -1)


def test_weights_and_kv_of_all_engines_have_to_fit(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", GIB // 2, dtype="bfloat16")
    require_memory([spec(model), spec(model)], 5 * GIB)
    with pytest.raises(BadRequest) as refused:
        require_memory([spec(model), spec(model)], 5 * GIB - 1)
    assert refused.value.message.startswith(
        "--kv-cache-gib: 2 engines with 0.5 GiB of weights and 2 GiB of KV each need 5.0 GiB, and 5.0 GiB are free"
    )
    with pytest.raises(BadRequest, match=r"an engine with 1\.0 GiB of weights"):  # twice as large as in the file
        require_memory([spec(model, dtype="float32")], 3 * GIB - 1)
    with pytest.raises(BadRequest, match=r"need 4\.5 GiB"):  # each rank has a KV cache of its own
        require_memory([spec(model, "-tp", "2")], 4 * GIB)


@pytest.mark.parametrize("flag", ["--kv-cache-memory-bytes=1000", "--load-format=dummy"])
def test_who_decides_on_memory_himself_is_not_corrected(tmp_path: Path, flag: str) -> None:
    require_memory([spec(checkpoint(tmp_path / "model", GIB), flag)], 0)


def test_gpus_and_simulated_engines_need_no_memory_here(tmp_path: Path) -> None:
    require_memory([spec(checkpoint(tmp_path / "model", GIB), cores=())], 0)


def test_workers_that_share_cores_are_told(tmp_path: Path) -> None:
    assert shared_cores([spec(tmp_path, cores=(0,)), spec(tmp_path, cores=(1,))]) is None
    assert shared_cores([spec(tmp_path, cores=())] * 3) is None
    said = shared_cores([spec(tmp_path, cores=(0,)), spec(tmp_path, cores=(1,)), spec(tmp_path, cores=(0,))])
    assert said == "3 workers of engines share 2 cores, so all of them will be slow"
    assert shared_cores([spec(tmp_path, "-tp", "2", cores=(0,))]) is not None


async def test_a_fleet_that_will_not_fit_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.cluster.local.devices_for_engines", tuple)
    logs = tmp_path / "logs"
    config = UpConfig(port=0, log_dir=str(logs), kv_cache_gib=100_000)
    with pytest.raises(BadRequest, match="--kv-cache-gib: 2 engines with"):
        async with local_fleet(config, str(checkpoint(tmp_path / "model")), lambda *_: None):
            pytest.fail("it should not have started")
    assert not logs.exists()


@pytest.mark.parametrize(("allowed", "enough"), [(resource.RLIM_INFINITY, True), (6 * GIB, True), (4 * GIB, False)])
def test_an_address_space_that_is_too_small_is_told_before_anything_loads(
    allowed: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    model = checkpoint(tmp_path / "m", GIB)
    if enough:
        require_memory([spec(model)], 100 * GIB)
        return
    with pytest.raises(BadRequest, match=r"ulimit -v") as refused:
        require_memory([spec(model)], 100 * GIB)
    assert "4.0 GiB here" in refused.value.message
    require_memory([spec(model, cores=())], 100 * GIB)
