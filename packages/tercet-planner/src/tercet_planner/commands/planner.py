"""``tercet planner``: run a planner, which simulates other fleets for a router."""

from __future__ import annotations

import msgspec

from tercet.cli.setting_flags import settings_command
from tercet.cli.which_fleet import WhichFleet
from tercet_planner.planner_settings import PlannerConfig


@settings_command(PlannerConfig)
def planner(config: PlannerConfig) -> None:
    """Plan a router's fleet: simulate the last minutes' requests with other roles, and advise or act.

    The planner runs at a low priority, in a set share of one core. The router needs objectives. In each interval the
    planner reports its forecast for the fleet, and how its earlier forecast came true.

    Examples:
    - `tercet planner`
    - `tercet planner --url http://10.0.0.5:8000`
    - `tercet planner --act roles --profile mine.json --planner-interval 30`
    - `tercet planner --planner mine.py:wanted`
    """
    from tercet_planner.live_planner import serve_planner

    url = WhichFleet(config.url or None, config.router_port).router_url()
    serve_planner(msgspec.structs.replace(config, url=url, router_port=None))
