"""The page of a running router."""

from __future__ import annotations

import os
import time

import msgspec
from starlette.types import ASGIApp

from tercet.router.page.engine_rows import ReportedLoads
from tercet.router.page.other_workers import OtherWorkers
from tercet.router.page.page_app import PageApp
from tercet.router.page.records import About
from tercet.router.page.viewers import Viewers
from tercet.router.page.watch import FleetWatch, about_service
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.shared_state import SharedState
from tercet.wire.serving.server_access import RouterKeys


def with_page(
    app: ASGIApp, state: SharedState, keys: RouterKeys, model: str, shutdown: Shutdown, admin_apart: bool = False
) -> ASGIApp:
    """Return an application with the page of the fleet that serves ``model``, before ``app``."""
    service = state.service
    fleet = service.fleet

    def about() -> About:
        refusal = state.reports.refusal()
        roles = "fixed" if state.role_keeper is None else "auto"
        found = about_service(service, model, roles, "" if refusal is None else refusal.message)
        return msgspec.structs.replace(found, process=os.getpid(), workers=1 + len(others))

    def watch() -> FleetWatch:
        epoch = time.time() - fleet.costs.clock()
        return FleetWatch(service, ReportedLoads(fleet), about, epoch)

    others = OtherWorkers(state.traces.others, state.traces.frames_of)
    viewers = Viewers(watch, lambda: len(fleet.members), lambda: shutdown.has_begun, others)
    state.traces.frames = lambda: viewers.stream(viewers.enter_worker())
    return PageApp(app, viewers, keys.access, keys.clients, admin_apart)
