"""The agent: a process beside each worker that moves its KV."""

from tercet.transport.agent.agent_process import AgentProcess, SharedKV
from tercet.transport.agent.control_channel import ControlClient

__all__ = ["AgentProcess", "ControlClient", "SharedKV"]
