"""Faults on purpose: fleets under load whose processes, networks and disks fail, and what must be true afterwards.

``fault_schedule`` and ``client_load`` decide what happens, from a seed; ``invariants`` judge what was seen; none of
them does I/O. Two arenas make it happen: ``simulated_arena`` in virtual time, over the code that runs in production
from the front door's service to the engine's sockets, and ``real_arena`` with processes of this machine.
"""
