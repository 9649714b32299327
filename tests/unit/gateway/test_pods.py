"""An endpoint picker whose engines are pods, as its command line has it."""

from __future__ import annotations

from pathlib import Path

import yaml

from tercet.settings import DiscoverySettings
from tercet_gateway.gateway_settings import PickerConfig
from tercet_gateway.server import fleet_of, picking
from tests.longest_wait import until
from tests.unit.fleet.discovery.api_server import (
    EARLIER_POOLS,
    NAMESPACE,
    OBJECTIVES,
    POOLS,
    api_server,
    earlier_pool,
    objective,
    pod,
    pool,
)


def kubeconfig(file: Path, url: str) -> Path:
    content = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "namespace": NAMESPACE}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
    }
    file.write_text(yaml.safe_dump(content))
    return file


async def test_its_fleet_is_known_before_it_serves(tmp_path: Path) -> None:
    async with api_server() as server:
        server.put(pod("a", "127.0.0.1", annotations={"tercet/port": "1"}))
        file = kubeconfig(tmp_path / "config", server.url)
        found = DiscoverySettings(endpoint_selector="app=engine", kubeconfig=str(file))
        async with fleet_of(PickerConfig(discovery=found)) as fleet:
            assert {each.name: each.url for each in fleet.members} == {"a": "http://127.0.0.1:1"}
            server.delete("a")
            await until(lambda: not fleet.members)


async def test_a_pool_of_the_earlier_group_and_its_objectives(tmp_path: Path) -> None:
    async with api_server() as server:
        server.put(pod("a", "127.0.0.1"))
        server.put(earlier_pool("pool", {"app": "engine"}, 1), EARLIER_POOLS)
        server.put(objective("chat", 10), OBJECTIVES)
        server.put(objective("batch", -1, group="inference.networking.x-k8s.io"), OBJECTIVES)
        file = kubeconfig(tmp_path / "config", server.url)
        found = DiscoverySettings(pool_name="pool", pool_group="inference.networking.x-k8s.io", kubeconfig=str(file))
        config = PickerConfig(discovery=found, port=0, metrics_port=0)
        async with fleet_of(config) as fleet, picking(fleet, config) as made:
            await until(lambda: made.picker.objectives == {"batch": -1} and fleet.members)


async def test_priorities_are_those_of_the_pools_objectives_and_its_own_flags(tmp_path: Path) -> None:
    async with api_server() as server:
        server.put(pod("a", "127.0.0.1"))
        server.put(pool("pool", {"app": "engine"}, 1), POOLS)
        server.put(objective("chat", 10), OBJECTIVES)
        server.put(objective("batch", -1), OBJECTIVES)
        file = kubeconfig(tmp_path / "config", server.url)
        found = DiscoverySettings(pool_name="pool", kubeconfig=str(file))
        config = PickerConfig(discovery=found, port=0, metrics_port=0, objectives={"chat": "3", "own": "4"})
        async with fleet_of(config) as fleet, picking(fleet, config) as made:
            await until(lambda: made.picker.objectives == {"chat": 3, "own": 4, "batch": -1})
            server.delete("batch", OBJECTIVES)
            server.delete("chat", OBJECTIVES)
            await until(lambda: made.picker.objectives == {"chat": 3, "own": 4})
