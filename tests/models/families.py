"""Model families, each as a tiny configuration: as many layers of each kind as the family mixes, and random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .drafters import Drafter, eagle3_head, eagle_head, with_predictor

WINDOW = 160
"""Tokens that layers with a window look back at: more than a block, and no whole number of them."""
SIZES: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {**SIZES, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}


@dataclass(frozen=True)
class Family:
    """``config`` makes a transformers configuration. ``kv`` says what a receiver is sent, in words.

    ``flags`` are vLLM's, which an engine of the family gets. ``refusal`` is part of what an engine says that refuses
    the family at its start. ``not_on_cpu`` is why vLLM's CPU build does not run it in float32. ``drafter`` guesses
    tokens ahead. ``rewrite`` makes of what transformers saves, which is given with the configuration, what vLLM loads.
    """

    title: str
    config: Callable[[], Any]
    kv: str = "all blocks"
    flags: tuple[str, ...] = ()
    refusal: str = ""
    not_on_cpu: str = ""
    drafter: Drafter | None = None
    rewrite: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None

    def found(self, length: int, block: int) -> int:
        """How many of so many tokens a request takes that begins with them, once they are in the prefix cache."""
        dropped = self.drafter is not None and self.drafter.drops_a_block
        return max(0, length // block - dropped) * block


def _of(name: str, **fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(**{**SIZES, **fields})

    return make


def _layers(*kinds: str) -> list[str]:
    return [f"{kind}_attention" for kind in kinds]


WINDOWED = "all blocks of the full layers, the window's of the others"
# vLLM's CPU kernels of Mamba 2 fail at a prompt of which a step computes more than a block.
MAMBA_2 = ("--max-num-batched-tokens", "128")
STATES = "all blocks of the attention layers, of the others the last state and the one before its block"
MAMBA_1 = "no kernel for Mamba-1 layers"
LATENT = "vLLM cannot compute tokens of an MLA model after existing KV"
# What DeepSeek's generations have in common.
LATENT_EXPERTS: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "head_dim": 64,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ALTERNATING = _layers("sliding", "full", "sliding", "full")

DRAFTED = "all blocks, of the drafter's layers, too"
EXPERTS_OF_GLM: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _of("Llama")),
    "llama_ngram": Family("Llama, n-gram speculation", _of("Llama"), flags=("--speculative-config", NGRAM)),
    "llama_draft_model": Family(
        "Llama, guesses of a draft model",
        _of("Llama"),
        DRAFTED,
        drafter=Drafter("draft_model", "llama", drops_a_block=False),
    ),
    "llama_eagle": Family("Llama, EAGLE", _of("Llama"), DRAFTED, drafter=Drafter("eagle", "eagle_head")),
    "llama_eagle3": Family("Llama, EAGLE-3", _of("Llama"), DRAFTED, drafter=Drafter("eagle3", "eagle3_head")),
    "llama_stages": Family("Llama, two pipeline stages", _of("Llama"), flags=("--pipeline-parallel-size", "2")),
    # Its heads are as wide as the hidden size makes them, and vLLM's CPU kernels know none of 16.
    "llama_one_head": Family(
        "Llama, one KV head that two ranks hold",
        _of("Llama", num_key_value_heads=1),
        "all blocks, from each rank to its counterpart",
        flags=("--tensor-parallel-size", "2"),
    ),
    "qwen2": Family("Qwen 2", _of("Qwen2", hidden_size=128)),
    "glm4_moe": Family(
        "GLM 4.5, multi-token prediction (MTP)",
        _of("Glm4Moe", num_nextn_predict_layers=1, **EXPERTS_OF_GLM),
        DRAFTED,
        drafter=Drafter("mtp", None),
        rewrite=with_predictor,
    ),
    "qwen3": Family("Qwen 3", _of("Qwen3")),
    "qwen3_moe": Family("Qwen 3 MoE", _of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)),
    "mistral": Family(
        "Mistral, with a window in all layers", _of("Mistral", sliding_window=WINDOW), "the window's blocks"
    ),
    "gemma2": Family("Gemma 2", _of("Gemma2", **GEMMA, layer_types=ALTERNATING), WINDOWED),
    "gemma3": Family(
        "Gemma 3",
        _of(
            "Gemma3Text",
            **{**GEMMA, "num_hidden_layers": 6},
            layer_types=_layers("sliding", "sliding", "full", "sliding", "sliding", "full"),
        ),
        WINDOWED,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        _of("GptOss", sliding_window=WINDOW, layer_types=ALTERNATING, num_local_experts=4, num_experts_per_tok=2),
        WINDOWED,
    ),
    "olmo3": Family("Olmo 3", _of("Olmo3", sliding_window=WINDOW, layer_types=ALTERNATING), WINDOWED),
    "cohere2": Family(
        "Command R7B (Cohere 2)",
        _of("Cohere2", sliding_window=WINDOW, layer_types=ALTERNATING, tie_word_embeddings=True),
        WINDOWED,
    ),
    "llama4": Family(
        "Llama 4",
        _of(
            "Llama4Text",
            attention_chunk_size=256,
            num_local_experts=2,
            num_experts_per_tok=1,
            intermediate_size_mlp=128,
            interleave_moe_layer_step=1,
            layer_types=["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        ),
        "all blocks of the full layers, the chunk's of the others",
    ),
    "deepseek_v2": Family(
        "DeepSeek V2", _of("DeepseekV2", q_lora_rank=None, **LATENT_EXPERTS), "all blocks, of latent KV", refusal=LATENT
    ),
    "deepseek_v3": Family(
        "DeepSeek V3, R1, Kimi K2",
        _of("DeepseekV3", q_lora_rank=32, topk_method="noaux_tc", **LATENT_EXPERTS),
        "all blocks, of latent KV",
        refusal=LATENT,
    ),
    "qwen3_next": Family(
        "Qwen 3 Next",
        _of(
            "Qwen3Next",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        ),
        STATES,
        not_on_cpu="vLLM's CPU kernels of gated delta nets want bfloat16",
    ),
    "jamba": Family(
        "Jamba",
        _of(
            "Jamba",
            hidden_size=128,
            num_experts=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=16,
            use_mamba_kernels=False,
        ),
        STATES,
        refusal=MAMBA_1,
    ),
    "granite_hybrid": Family(
        "Granite 4 (hybrid)",
        _of(
            "GraniteMoeHybrid",
            hidden_size=128,
            layer_types=["mamba", "attention", "mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=128,
        ),
        STATES,
        MAMBA_2,
    ),
    "nemotron_h": Family(
        "Nemotron-H",
        _of(
            "NemotronH",
            hybrid_override_pattern="M*-M*-",
            num_hidden_layers=6,
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=1,
        ),
        STATES,
        MAMBA_2,
    ),
}

HEADS: dict[str, Family] = {
    "eagle_head": Family("EAGLE's head of a Llama", _of("Llama", num_hidden_layers=1), rewrite=eagle_head),
    "eagle3_head": Family(
        "EAGLE-3's head of a Llama",
        # vLLM's own choice among so few layers has one twice.
        _of("Llama", num_hidden_layers=1, eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        rewrite=eagle3_head,
    ),
}
"""What only drafts."""
CHECKPOINTS = {**FAMILIES, **HEADS}
