"""``tercet store``: keep KV in host memory and on disk, in the foreground."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tercet.cli.setting_flags import flags_as_records, require_defaults
from tercet.protocol import BadRequest
from tercet.protocol.names import LAST_PORT

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class StoreFlags:
    """A store to run: where it keeps KV, whose KV, and where it serves."""

    mirror: Annotated[
        list[str],
        typer.Option(metavar="URL", help="An engine whose KV is kept; of several, the first that answers. Repeatable."),
    ]
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Host memory for KV, such as 64GiB.")] = "4GiB"
    disk: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for KV on disk.", show_default="memory only")
    ] = None
    disk_size: Annotated[str, typer.Option(metavar="SIZE", help="Disk space for KV; needs --disk.")] = "100GiB"
    port: Annotated[int, typer.Option(min=1, max=LAST_PORT, help="Port of the HTTP server.")] = 8100
    host: Annotated[
        str, typer.Option(help="IP address of this machine, at which routers and engines reach the store.")
    ] = "127.0.0.1"
    name: Annotated[str | None, typer.Option(help="Name of the store.", show_default="HOST:PORT")] = None
    join: Annotated[
        str | None, typer.Option(metavar="URL", help="Join the fleet of the router at this URL.", show_default="none")
    ] = None
    transport: Annotated[str, typer.Option(help="Transport of KV, as `transport` of engines.")] = "auto"
    kv_port: Annotated[
        str, typer.Option(metavar="PORT", help="First port for KV to try, or a range first-last; 0: any.")
    ] = "0"
    kv_events_port: Annotated[
        int,
        typer.Option(min=0, max=LAST_PORT - 1, help="Port of KV events; who missed some asks at the next one; 0: any."),
    ] = 0


@flags_as_records
def store(given: StoreFlags) -> None:
    """Run a store: it keeps KV of engines in host memory and on disk, and outlives them.

    A store has two of the three verbs, and computes nothing. Its role in a router's fleet is `store`.

    Examples:
    - `tercet store --mirror http://127.0.0.1:8001 --memory 4GiB --disk /var/lib/tercet --disk-size 100GiB`
    - `tercet store --mirror http://10.0.0.5:8001 --host 10.0.0.7 --join http://10.0.0.9:8000`
    - `tercet router --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8100,role=store`
    - `tercet engines add store-0 http://127.0.0.1:8100 --role store`, at a running router
    """
    from ipaddress import ip_address

    from tercet.cluster.ports import require_free
    from tercet.logs import log_as_the_environment_says
    from tercet.protocol.access import key_of
    from tercet.protocol.names import port_range, require_engine_name
    from tercet.settings import SECRET_VARIABLE, require_engine_url, require_url
    from tercet.transport import TRANSPORTS
    from tercet.wire.serving.server_access import require_key_beyond_loopback

    for url in given.mirror:
        require_engine_url(url, "--mirror")
    memory, disk_size = bytes_of(given.memory, "--memory"), bytes_of(given.disk_size, "--disk-size")
    if given.join is not None:
        require_url(given.join, "--join", "http://10.0.0.9:8000")
    if given.disk is None:
        require_defaults(given, "--disk", "disk_size")
    try:
        unusable = ip_address(given.host).is_unspecified
    except ValueError:
        unusable = True
    if unusable:
        raise BadRequest(f"--host: {given.host!r} is not an IP address at which others reach this machine", "--host")
    if given.transport not in TRANSPORTS:
        raise BadRequest(f"--transport: must be one of {', '.join(TRANSPORTS)}, is {given.transport!r}", "--transport")
    kv_ports = port_range(given.kv_port, "--kv-port")
    name = given.name or f"{given.host}:{given.port}"
    require_engine_name(name, "--name")
    secret = key_of(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)
    # Behind this port is KV of everybody's prompts.
    require_key_beyond_loopback(given.host, [secret])
    require_free(given.host, given.port)
    log_as_the_environment_says("info")
    from tercet.store.server import StoreConfig, serve  # imports uvicorn and NumPy

    urls = [url.rstrip("/") for url in given.mirror]
    serve(
        StoreConfig(
            name=name, host=given.host, port=given.port, mirrors=urls, memory=memory, disk=given.disk,
            disk_size=disk_size if given.disk is not None else 0, transport=given.transport, secret=secret,
            join=given.join or "", kv_ports=kv_ports, kv_events_port=given.kv_events_port,
        )
    )  # fmt: skip


def bytes_of(text: str, flag: str) -> int:
    """Return the bytes of a size such as ``4GiB``; raise :class:`~tercet.protocol.BadRequest` for another text."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([KMGT]iB)", text.strip())
    size = int(float(found[1]) * UNITS[found[2]]) if found is not None else 0
    if not size:
        raise BadRequest(f"{flag}: must be a size such as 512MiB, 4GiB or 2TiB, is {text!r}", flag)
    return size
