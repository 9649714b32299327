"""Settings of ``tercet router``: those that it shares with ``tercet up``, and those of the router only."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.admin_address import AdminAddress
from tercet.settings.declaration import FixedPort, Setting
from tercet.settings.discovery_settings import DiscoverySettings
from tercet.settings.engine_addresses import EngineAddress, engine_fields, require_unlike
from tercet.settings.panels import ACCESS, ENGINES, SERVER
from tercet.settings.process_settings import EngineTLS, LeastLogged, SupervisorKey
from tercet.settings.router_settings import RouterSettings

_KUBERNETES_NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_CONFIGMAP = rf"^({_KUBERNETES_NAME}/)?{_KUBERNETES_NAME}\Z"
_RAY_RECORD = rf"^([^\s/]+:[0-9]{{1,5}}/)?{_KUBERNETES_NAME}\Z"


class RouterConfig(RouterSettings, frozen=True, kw_only=True):
    """Settings of ``tercet router``; ``discovery`` and ``engine_tls`` are groups."""

    engines: Annotated[
        tuple[EngineAddress, ...],
        Setting(
            "URL of an engine; role: prefill, decode or both, labels: for scheduling. Repeatable.", flag="--engine",
            metavar="URL[,role=R][,name=N][,label.KEY=V]", read=engine_fields, panel=ENGINES,
        ),
    ] = ()  # fmt: skip
    discovery: DiscoverySettings = DiscoverySettings()
    # Kubernetes sets TERCET_PORT to a URL if a service is called tercet.
    port: Annotated[FixedPort, Setting("Port of the OpenAI API.", env="TERCET_HTTP_PORT", panel=SERVER)] = 8000
    state: Annotated[
        str | None,
        Setting(
            "File that keeps engines, programs and scheduling; routers with the same file share them.",
            metavar="FILE", default="a private file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    state_configmap: Annotated[
        Annotated[str, Meta(pattern=_CONFIGMAP)] | None,
        Setting(
            "ConfigMap for this state, for routers on several machines.",
            metavar="[NAMESPACE/]NAME", default="a file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    state_ray: Annotated[
        Annotated[str, Meta(pattern=_RAY_RECORD)] | None,
        Setting(
            "Record in Ray's head for this state; for routers on several machines.",
            metavar="[HOST:PORT/]NAME", default="a file", panel=ENGINES,
        ),
    ] = None  # fmt: skip
    admin_listen: Annotated[
        str | None,
        Setting(
            "Address at which `/tercet/v1` is served instead of the clients' port.",
            metavar="ADDRESS",
            default="off",
            panel=ACCESS,
        ),
    ] = None
    await_engines: Annotated[
        bool,
        Setting("Start without an engine, and answer 503 until one joins.", default="off", panel=ENGINES),
    ] = False
    supervisor_key: SupervisorKey = ""
    engine_tls: EngineTLS = EngineTLS()
    log_level: LeastLogged = "info"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unlike(self.engines, self.discovery, self.await_engines)
        if self.state_ray is not None and self.state_configmap is not None:
            raise BadRequest("state-ray: cannot be combined with state-configmap; remove one", "state-ray")
        self.require_stream_ports_without(self.port)
        address = self.admin_address
        if address is not None and address.port == self.port:
            raise BadRequest(f"admin-listen: clients use the port {self.port}; choose another one", "admin-listen")
        if address is not None and self.stream_port and 0 <= address.port - self.stream_port < self.workers:
            raise BadRequest("admin-listen: token streams use this port; choose another one", "admin-listen")

    @property
    def admin_address(self) -> AdminAddress | None:
        """The address of admin routes; None if they are served at the port for clients."""
        return None if self.admin_listen is None else AdminAddress.of(self.admin_listen)
