"""The router's admin routes: they show engines, programs and running sequences, and change engines and programs."""

from tercet.router.admin.admin_routes import routes
from tercet.router.admin.admin_server import install

__all__ = ["install", "routes"]
