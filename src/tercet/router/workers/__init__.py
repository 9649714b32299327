"""Several front-door processes behind one port: a supervisor starts them, replaces them, and keeps them of one mind.

Each worker has its own view of the fleet, its own programs and its own token streams. A change that an operator asks of
one of them is made by all, in the same order everywhere.
"""

from tercet.router.workers.supervisor import supervise

__all__ = ["supervise"]
