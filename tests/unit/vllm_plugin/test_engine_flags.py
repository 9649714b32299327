"""How an engine must be started for its KV to be moved, and what it is told otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tercet.vllm_plugin.connector import TercetConnector
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.start import start_checks
from tercet.vllm_plugin.start.start_checks import require_both_roles, require_memory_that_stays


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_sends_and_receives(role: str) -> None:
    """By this role vLLM keeps blocks back that a step under way still writes into."""

    def config(role: str) -> Any:
        return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=role))

    require_both_roles(config("kv_both"))
    with pytest.raises(UnsupportedVLLM, match=rf"kv_role is '{role}'.*set it to 'kv_both'"):
        require_both_roles(config(role))


def test_kv_stays_where_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=True))
    require_memory_that_stays(config)  # on a CPU, vLLM takes none away
    monkeypatch.setattr(start_checks, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(UnsupportedVLLM, match="--enable-sleep-mode"):
        require_memory_that_stays(config)
    config.model_config.enable_cumem_allocator = False
    require_memory_that_stays(config)
    assert not TercetConnector.supports_sleep_mode(None)
