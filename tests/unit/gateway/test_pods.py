"""An endpoint picker whose engines are pods, as its command line has it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from tercet.gateway.server import fleet_of
from tercet.settings import DiscoverySettings, PickerConfig

from ..discovery.api_server import NAMESPACE, api_server, pod


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
            async with asyncio.timeout(10):
                while fleet.members:
                    await asyncio.sleep(0.01)
