"""An engine whose ranks are on two machines, here two addresses: it exchanges KV with one that is on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.long_runs import in_full
from tests.small_llama import small_llama
from tests.warm import spec_of

from .conftest import free_port, until_answering
from .processes import EnginePlace
from .unlike import require_same_tokens

ADDRESSES = ("127.0.0.2", "127.0.0.3")
LENGTHS = (1, 129, 300)

pytestmark = [
    in_full("channels at other addresses in tests/unit/transport; stages in make test-models"),
    pytest.mark.verifies("an engine on two machines", transport="tcp"),
]


def place_of(name: str, core: int, logs: Path, host: str, *more: str) -> EnginePlace:
    kv = ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"host": host}}))
    spec = spec_of(name, free_port(), "--max-model-len", "2048", *kv, *more, model=str(small_llama()))
    spec = msgspec.structs.replace(spec, cores=(core,))
    return EnginePlace.of(spec, logs / f"{name}.log", VLLM_HOST_IP=host, GLOO_SOCKET_IFNAME="lo")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The engines' URLs."""
    logs, first = tmp_path_factory.mktemp("two_machines"), ADDRESSES[0]
    spread = (
        "--nnodes",
        "2",
        "--pipeline-parallel-size",
        "2",
        "--master-addr",
        first,
        "--master-port",
        str(free_port()),
    )
    two = place_of("two", 0, logs, first, *spread, "--node-rank", "0")
    further = place_of("further", 1, logs, ADDRESSES[1], *spread, "--node-rank", "1", "--headless")
    one = place_of("one", 0, logs, "127.0.0.1")
    try:
        for each in (further, two, one):
            each.start()
        until_answering([two, one])
        yield {"two": two.url, "one": one.url}
    finally:
        for each in (two, one, further):
            each.stop(kill_after=20)


@pytest.mark.parametrize(("source", "target"), [("two", "one"), ("one", "two")])
async def test_kv_goes_to_and_from_both_machines(urls: dict[str, str], source: str, target: str) -> None:
    await require_same_tokens(urls[source], urls[target], urls["one"], LENGTHS)
