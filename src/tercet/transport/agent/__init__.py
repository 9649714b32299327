"""The agent: a process beside each worker that moves its KV."""

from tercet.transport.agent.control import ControlClient
from tercet.transport.agent.process import AgentProcess, SharedKV

__all__ = ["AgentProcess", "ControlClient", "SharedKV"]
