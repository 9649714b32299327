"""``tercet planner``: run a planner, which simulates other fleets for a router."""

from __future__ import annotations

from tercet.cli.setting_flags import settings_command
from tercet_lab.planning.live_planner import serve_planner
from tercet_lab.planning.planner_settings import PlannerConfig


@settings_command(PlannerConfig)
def planner(config: PlannerConfig) -> None:
    """Plan a router's fleet: simulate the last minutes' requests with other roles, and advise or act.

    The planner runs at a low priority, in a set share of one core. The router needs objectives. In each interval the
    planner reports its forecast for the fleet, and how its earlier forecast came true.

    Examples:
    - `tercet planner --url http://127.0.0.1:8000`
    - `tercet planner --act roles --profile mine.json --planner-interval 30`
    - `tercet planner --planner mine.py:wanted`
    """
    serve_planner(config)
