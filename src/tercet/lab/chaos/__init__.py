"""Deliberate faults: fleets under load whose processes, networks and disks fail, and the invariants afterwards.

``fault_schedule`` and ``client_load`` decide what happens, from a seed; ``invariants`` judge the observations; none of
them does I/O. Two arenas carry it out: ``simulated_arena`` in virtual time, over the production code from the router
's service to the engine's sockets, and ``real_arena`` with processes of this machine.
"""
