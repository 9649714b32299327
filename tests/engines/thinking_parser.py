"""A reasoning parser for a model that has no tokens for it: it thinks until its first full stop.

Given to vLLM by ``--reasoning-parser-plugin``; imports vLLM, and nothing but vLLM imports it.
"""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


class UntilFullStop(BaseThinkingReasoningParser):
    """What comes before ``.`` is the reasoning."""

    @property
    def start_token(self) -> str:
        return "<|im_start|>"

    @property
    def end_token(self) -> str:
        return "."


ReasoningParserManager.register_module("until-full-stop", module=UntilFullStop)
