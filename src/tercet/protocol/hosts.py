"""Hosts and ports as URLs have them, with IPv6 addresses in brackets."""

from __future__ import annotations

LAST_PORT = 65535


def bracketed(host: str) -> str:
    """Return a name or address in the form that goes before ``:port``."""
    return f"[{host}]" if ":" in host else host


def host_and_port(host: str, port: int) -> str:
    """Return ``host:port``."""
    return f"{bracketed(host)}:{port}"
