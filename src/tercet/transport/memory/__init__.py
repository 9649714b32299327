"""The memory that holds KV, in the form that transfers need.

There are two kinds. *Host pages* (:class:`~.kv_memory.HostPages`) are sent from, and received into, directly. *Staged*
memory (:class:`~.staged.StagedMemory`) is reached only through buffers in host memory: an accelerator's memory, or in
tests the host's in that role.
"""
