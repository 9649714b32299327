"""Several front-door processes behind one port: a supervisor starts them and replaces those that end.

Each worker has its own view of the fleet, its own programs and its own token streams. What operators change reaches all
of them by the state that they follow: see :mod:`tercet.router.shared_state`.
"""

from tercet.router.workers.supervisor import supervise

__all__ = ["supervise"]
