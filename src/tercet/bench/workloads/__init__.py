"""What requests ask. A workload plans conversations as token ids; no I/O but reading the files that users name."""

from tercet.bench.workloads.plan import Conversation, Turn, plan
from tercet.bench.workloads.spec import Phase, Workload, parse_phase, parse_phases
from tercet.bench.workloads.vocabulary import HashedWords, Vocabulary

__all__ = [
    "Conversation",
    "HashedWords",
    "Phase",
    "Turn",
    "Vocabulary",
    "Workload",
    "parse_phase",
    "parse_phases",
    "plan",
]
