"""The memory that KV lies in, as those need it who move it.

Two kinds. *Host pages* (:class:`~.kv_memory.HostPages`) are sent from, and received into, where they lie. *Staged*
memory (:class:`~.staged.StagedMemory`) is reached through buffers in host memory and no other way: an accelerator's,
or in tests the host's in that role.
"""
