"""A simulated engine in real time, behind the HTTP surface of a real one."""

from tercet.sim.serving.sim_server import ServerConfig, serve, serving

__all__ = ["ServerConfig", "serve", "serving"]
