"""The agent: a process beside each worker that moves its KV."""
