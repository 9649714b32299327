"""The agent: a process next to each worker that moves its KV."""
