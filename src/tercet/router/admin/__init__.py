"""The router's admin routes: they show engines, programs and running sequences, and change engines and programs."""

from tercet.router.admin.installing import install, router

__all__ = ["install", "router"]
