"""Sequences are counted before any is made."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.protocol import BadRequest
from tercet.router.request_bodies import require_few_sequences

TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "fields", "count", "field"),
    [
        ("/v1/completions", {"prompt": ["x"] * 1024, "n": 16384}, 1024 * 16384, "n"),
        ("/v1/completions", {"prompt": "x", "n": 9}, 9, "n"),
        ("/v1/completions", {"prompt": "x", "n": "9"}, 9, "n"),
        ("/v1/completions", {"prompt": "x", "n": 9.0, "use_beam_search": True}, 9, "n"),
        ("/v1/completions", {"prompt": [[1, 2]] * 9}, 9, "prompt"),
        ("/v1/completions", {"prompt_embeds": ["x"] * 9}, 9, "prompt_embeds"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 3}, 9, "n"),
        ("/v1/chat/completions", {"messages": [TURN], "n": 9}, 9, "n"),
        ("/v1/chat/completions/batch", {"messages": [[TURN]] * 3, "n": 3}, 9, "n"),
        ("/v1/chat/completions/batch", {"messages": [[TURN]] * 9}, 9, "messages"),
        ("/generative_scoring", {"items": ["x"] * 9}, 9, "items"),
        ("/v1/systemone", {"questions": {str(n): {} for n in range(9)}}, 9, "questions"),
        ("/invocations", {"prompt": ["x"] * 9}, 9, "prompt"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 9}}, 9, "n"),
    ],
)
def test_too_many_are_refused_by_their_number(path: str, fields: Any, count: int, field: str) -> None:
    require_few_sequences(path, fields, count)
    with pytest.raises(BadRequest, match=f"asks for {count} sequences") as refused:
        require_few_sequences(path, fields, 8)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1] * 1000}),
        ("/v1/completions", {"prompt": "x", "n": None}),
        ("/v1/completions", {"prompt": "x", "n": "many"}),
        ("/v1/completions", {"prompt": [], "n": -5}),
        ("/v1/chat/completions", {"messages": [TURN] * 1000, "items": ["x"] * 1000}),
        ("/v1/responses", {"input": [TURN] * 1000}),
        ("/v1/messages", {"messages": [TURN] * 1000}),
        ("/v1/completions", None),
    ],
)
def test_what_is_one_sequence_or_vllms_to_refuse(path: str, fields: Any) -> None:
    require_few_sequences(path, fields, 1)
