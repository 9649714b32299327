"""What ``tercet planner`` can be told."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.settings.declaration import Setting, Settings
from tercet.settings.planner_settings import PLANNER, PlannedBy, PlannerSettings
from tercet.settings.process_settings import AdminKey, AdminKeyFile, LeastLogged, LogLines

CPUShare = Annotated[float, Meta(gt=0, le=1)]


class PlannerConfig(Settings, frozen=True):
    """A planner of a router's fleet; ``planning`` is a group. Without ``act`` it only advises."""

    url: Annotated[str, Setting("A router, whose fleet is planned.")] = "http://127.0.0.1:8000"
    profile: Annotated[
        str,
        Setting("Profile of an engine, which simulations go by: one that `tercet profile` shows, or a JSON file."),
    ] = "llama-3.1-8b-h100-tp1"
    planner: PlannedBy = "simulate"
    act: Annotated[
        Literal["advise", "roles", "scale"],
        Setting("`advise`: say what should change; `roles`: change roles; `scale`: start and stop engines as well.",
                panel=PLANNER),
    ] = "advise"  # fmt: skip
    namespace: Annotated[
        str | None,
        Setting("With `--act scale`: the namespace of Kubernetes whose pods are the engines.",
                default="engines of `tercet up` on this machine", panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-namespace")  # fmt: skip
    kubeconfig: Annotated[
        str | None,
        Setting("With `--planner-namespace`: how to reach Kubernetes.", default="the pod's service account",
                panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-kubeconfig")  # fmt: skip
    programs: Annotated[
        tuple[str, ...],
        Setting("Another program to simulate for the same fleet, and to propose if it gains; repeatable.",
                flag="--planner-program", metavar="PROGRAM[,KEY=VALUE...]", panel=PLANNER),
    ] = msgspec.field(default=(), name="planner-programs")  # fmt: skip
    planning: PlannerSettings = PlannerSettings()
    planner_cpu: Annotated[
        CPUShare, Setting("Share of a core that plans may take: after a long one the next comes later.", panel=PLANNER)
    ] = 0.5  # fmt: skip
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        Setting("Port on 127.0.0.1 for Prometheus; 0 for none.", panel=PLANNER),
    ] = 0  # fmt: skip
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyFile = None
    log_level: LeastLogged = "info"
    log_format: LogLines = "text"
