"""What guesses tokens ahead (speculative decoding), as far as Tercet has to know it.

A drafter with KV of its own has layers like any others, in vLLM's KV cache groups: they are leased, sent and moved with
the model's. What it guesses from them is checked by the model, so KV of another drafter, or none, costs guesses and
never a token.

KV of EAGLE and MTP drafters at a position depends on the token after it, too. Of the last position of a send that is
the token that the sender has drawn, or would have: a receiver that goes on otherwise guesses a little worse there. vLLM
does not take the last block of what it finds in its prefix cache for that reason, and so it is with sent KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.vllm_plugin.engine.model_fingerprint import model_fingerprint
from tercet.vllm_plugin.hooks import UnsupportedVLLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

# What they draft comes from tokens, or from what the model has just computed; or, with a class of one's own, from what
# vLLM's KV cache knows nothing of.
WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class")


def require_drafter(config: VllmConfig) -> None:
    """Raise :class:`UnsupportedVLLM` for what vLLM calls speculation and is none, and takes another connector."""
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise UnsupportedVLLM(
            "--speculative-config: 'extract_hidden_states' hands hidden states to a KV connector made for them, and an "
            "engine has one connector; use it on an engine without Tercet"
        )


def drafter_of(config: VllmConfig) -> str:
    """Stands for the method and weights of the drafter whose KV lies beside the model's; empty if there is none.

    Its config says nothing more: vLLM writes into it what follows from the engine's flags.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method in WITHOUT_KV:
        return ""
    return f"{speculative.method}-{model_fingerprint(str(speculative.draft_model_config.model), {})}"


def tokens_of_a_step(scheduler: Scheduler) -> int:
    """For how many tokens a sequence that decodes has blocks in one step: one, guesses, and what is guessed from them.

    As vLLM reckons ``_spec_decode_step_blocks``.
    """
    guesses: int = scheduler.num_spec_tokens
    return 1 + guesses + scheduler.num_lookahead_tokens if guesses else 1
