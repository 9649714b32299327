"""Settings of ``tercet planner``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.settings.declaration import Port, Setting, Settings
from tercet.settings.process_settings import AdminKey, AdminKeyFile, LeastLogged, LogLines
from tercet_lab.planner_settings import PLANNER, PlannedBy, PlannerSettings

CPUShare = Annotated[float, Meta(gt=0, le=1)]


class PlannerConfig(Settings, frozen=True):
    """Settings of a planner of one fleet; ``planning`` is a group. With ``act="advise"`` the fleet is not changed."""

    url: Annotated[
        str,
        Setting(
            "URL of the router whose fleet is planned.",
            default="that of the only fleet here, else http://127.0.0.1:8000",
        ),
    ] = ""
    router_port: Annotated[
        Port | None, Setting("Port of that router on this machine, instead of --url.", flag="--port")
    ] = None
    profile: Annotated[
        str, Setting("Profile of an engine for simulations: a name that `tercet bench profile` lists, or a JSON file.")
    ] = "llama-3.1-8b-h100-tp1"
    planner: PlannedBy = "simulate"
    act: Annotated[
        Literal["advise", "roles", "scale"],
        Setting("Action: `advise` reports only, `roles` changes roles, `scale` also starts and stops engines.",
                panel=PLANNER),
    ] = "advise"  # fmt: skip
    namespace: Annotated[
        str | None,
        Setting("Kubernetes namespace whose pods are the engines; for `--act scale`.",
                default="engines of `tercet up` on this machine", panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-namespace")  # fmt: skip
    kubeconfig: Annotated[
        str | None,
        Setting("Kubeconfig file; for `--planner-namespace`.", metavar="FILE", default="the pod's service account",
                panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-kubeconfig")  # fmt: skip
    programs: Annotated[
        tuple[str, ...],
        Setting("Another program to simulate for the fleet, proposed if it is better. Repeatable.",
                flag="--planner-program", metavar="PROGRAM[,KEY=VALUE...]", panel=PLANNER),
    ] = msgspec.field(default=(), name="planner-programs")  # fmt: skip
    planning: PlannerSettings = PlannerSettings()
    # Share of a core that plans may use: after a long plan the next one comes later.
    planner_cpu: CPUShare = 0.5
    metrics_port: Annotated[
        Port,
        Setting("Port of /metrics on 127.0.0.1; 0 means none.", panel=PLANNER),
    ] = 0  # fmt: skip
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyFile = None
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"
