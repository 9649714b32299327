"""One tiny engine for each test; afterwards nothing is held in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.config import VllmConfig

from .moving_kv import NewPair, pairs_of
from .tiny_engine import TinyEngine, tiny_config


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return tiny_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(config: VllmConfig) -> Iterator[TinyEngine]:
    tiny = TinyEngine(config)
    yield tiny
    tiny.assert_nothing_held()


@pytest.fixture(scope="session")
def new_pair(config: VllmConfig) -> NewPair:
    return pairs_of(config)
