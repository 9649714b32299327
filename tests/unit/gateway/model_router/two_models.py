"""Two models whose tokenizers give the same words other ids: their checkpoints, and the answers that are right."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tercet_lab.prompt_texts import PromptTexts
from tercet_lab.sim.block_pool import VOCABULARY, Prompt

STRIDES = {"a": 1, "b": 7919}
"""By model, the distance between the ids of two words; all are prime to the vocabulary's size."""


def checkpoint(folder: Path, model: str) -> Path:
    """The tokenizer of ``model``, which has every id that a simulated engine answers with."""
    ids = {f"w{word}": word * STRIDES[model] % VOCABULARY for word in range(VOCABULARY)}
    assert len(set(ids.values())) == VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    directory = folder / f"checkpoint-{model}"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"max_position_embeddings": 4096}')
    return directory


class Answers:
    """What simulated engines of the models answer."""

    def __init__(self, checkpoints: dict[str, Path]) -> None:
        self._texts = {model: PromptTexts(path) for model, path in checkpoints.items()}

    def right(self, model: str, prompt: str, tokens: int) -> str:
        """The answer of ``model``: tokens and text by its own tokenizer."""
        texts = self._texts[model]
        return texts.decode(Prompt(tuple(texts.encode(prompt)), None).output(0, tokens))
