"""The number of settings: what operators have no use for is a constant."""

from __future__ import annotations

from tercet.cluster.up_config import UpConfig
from tercet.logs import EngineLog
from tercet.settings import RouterConfig, declared
from tercet.vllm_plugin.start.plugin_settings import PluginSettings
from tercet_gateway.gateway_settings import ModelRouterConfig, PickerConfig, SidecarConfig
from tercet_planner.planner_settings import PlannerConfig

OF_PROCESSES = (
    RouterConfig, UpConfig, PluginSettings, EngineLog, PickerConfig, SidecarConfig, ModelRouterConfig, PlannerConfig,
)  # fmt: skip


def test_processes_have_at_most_150_settings() -> None:
    names = {each.key.replace("_", "-") for kind in OF_PROCESSES for each in declared(kind)}
    assert len(names) <= 150


def test_a_field_without_a_description_is_a_constant() -> None:
    assert "wait-for-engine" not in {each.key for each in declared(RouterConfig)}
    assert RouterConfig(await_engines=True, wait_for_engine_s=1.0).wait_for_engine_s == 1.0
