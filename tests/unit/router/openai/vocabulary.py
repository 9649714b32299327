"""A small byte-level vocabulary: every byte, a few words, one special token."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = "<|end|>"
TEXTS = [
    "the quick brown fox",
    " jumps over the lazy dog",
    "na\u00efve caf\u00e9",
    "\u4f60\u597d",
    "\U0001f680 to the moon",
]


def backend(decoder: Any = None) -> Tokenizer:
    """A trained tokenizer of ``tokenizers``; ``decoder`` instead of the one that goes with bytes."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel() if decoder is None else decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[SPECIAL])
    )
    return made


def tokenizer(decoder: Any = None) -> Any:
    """It, as ``transformers`` has it."""
    return PreTrainedTokenizerFast(tokenizer_object=backend(decoder), eos_token=SPECIAL)
