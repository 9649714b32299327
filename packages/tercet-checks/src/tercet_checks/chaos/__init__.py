"""Fault injection: fleets under load whose processes, networks and disks fail, and checks of invariants afterwards.

``chaos_report`` plans a run from a seed and checks its records, without I/O. Two arenas carry out a run:
``simulated_arena`` in virtual time, with the production code from the router's service to the engine's sockets, and
``real_arena`` with processes on this machine.
"""
