"""Hosts and ports as URLs have them, where addresses of IPv6 are in brackets."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """A name or address as it is before ``:port``."""
    return f"[{host}]" if ":" in host else host


def host_and_port(host: str, port: int) -> str:
    """``host:port``."""
    return f"{bracketed(host)}:{port}"
