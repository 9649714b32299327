"""Workloads, which plan conversations as token ids. Their only I/O is reading the files that users name."""

from tercet_lab.bench.workloads.conversations import Conversation, ConversationTurn, Vocabulary, Workload
from tercet_lab.bench.workloads.recorded import Phase, parse_phase, parse_phases, plan

__all__ = [
    "Conversation", "ConversationTurn", "Phase", "Vocabulary", "Workload", "parse_phase", "parse_phases", "plan",
]  # fmt: skip
