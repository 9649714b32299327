"""``tercet planner``: a process that simulates what a router's fleet should be."""

from __future__ import annotations

from tercet.cli.setting_flags import settings_command
from tercet.lab.planning.live_planner import serve_planner
from tercet.settings.planner_config import PlannerConfig


@settings_command(PlannerConfig)
def planner(config: PlannerConfig) -> None:
    """Plan a router's fleet: simulate what other roles would give for the last minutes' requests, and advise or act.

    It runs at a low priority, in a stated share of one core. The router needs objectives. Every interval it says what
    it expects of the fleet, and what came of what it had expected before.

    Examples:
    - `tercet planner --url http://127.0.0.1:8000`
    - `tercet planner --act roles --profile mine.json --planner-interval 30`
    - `tercet planner --planner mine.py:wanted`
    """
    serve_planner(config)
