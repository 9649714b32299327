"""The memory that KV lies in, in the form that transfers need.

Two kinds. *Host pages* (:class:`~.kv_memory.HostPages`) are sent from, and received into, directly. *Staged* memory
(:class:`~.staged.StagedMemory`) is reached only through buffers in host memory: an accelerator's, or in tests the
host's in that role.
"""
