"""The router's own routes: its engines, its programs and what they run, and how to change the first two."""

from tercet.router.admin.installing import install, router

__all__ = ["install", "router"]
