"""Speculative decoding: the rules that concern moved KV.

A drafter with its own KV has layers like any others, in vLLM's KV cache groups: they are leased, sent and moved with
the model's layers. The model checks the drafter's guesses, so missing KV, or KV of another drafter, costs guesses and
never a token.

KV of EAGLE and MTP drafters at a position also depends on the token after it. For the last position of a send, that is
the token that the sender has sampled, or would have sampled: a receiver that continues with another token guesses a
little worse there. For that reason vLLM does not use the last block that it finds in its prefix cache, and the same
holds for sent KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.worker.model_fingerprint import model_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

# These methods draft from tokens, from the model's latest results or, with a custom class, from data outside of vLLM's
# KV cache.
WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class")


def require_drafter(config: VllmConfig) -> None:
    """Raise :class:`UnsupportedVLLM` for a speculation method that is not a drafter and needs another connector."""
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise UnsupportedVLLM(
            "--speculative-config: 'extract_hidden_states' needs a KV connector for hidden states, but an engine has "
            "one connector; use this method on an engine without Tercet"
        )


def drafter_of(config: VllmConfig) -> str:
    """Return an identifier of the method and weights of a drafter with its own KV; empty without such a drafter.

    The drafter's config is not used: vLLM writes values into it that follow from the engine's flags.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method in WITHOUT_KV:
        return ""
    return f"{speculative.method}-{model_fingerprint(str(speculative.draft_model_config.model), {})}"


def tokens_of_a_step(scheduler: Scheduler) -> int:
    """Return the number of tokens for which a decoding sequence has blocks in one step.

    These are one token, the guesses, and the tokens after them, as vLLM computes ``_spec_decode_step_blocks``.
    """
    guesses: int = scheduler.num_spec_tokens
    return 1 + guesses + scheduler.num_lookahead_tokens if guesses else 1
