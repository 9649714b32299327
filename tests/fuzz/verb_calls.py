"""Calls of the verbs for the fuzzer to mutate: a verb's name, a space, and JSON. Nothing here imports vLLM."""

from __future__ import annotations

from typing import Any

import msgspec

from tercet.protocol import KVAddrInfo, RankAddress
from tests.fuzz.mutation import Case
from tests.unit.fakes import LAYOUT

GETS = ("status", "sequences")
VERBS = ("prep_recv", "remote_send", "start_generate", "connect", "abort", "release", "sequences/s/move", *GETS)
LEASE, ADDRESS, KEY = "THE-LEASE", "THE-ADDRESS", "THE-KEY"


def seeds() -> list[Case]:
    """Calls that an engine takes, or refuses for what it has not."""

    def call(verb: str, **fields: Any) -> bytes:
        return verb.encode() + b" " + msgspec.json.encode(fields)

    prompt = list(range(10, 60))
    info = msgspec.to_builtins(
        KVAddrInfo("f" * 32, "other", 0, 48, "tcp", (RankAddress(0, ("tcp://127.0.0.1:2",)),), LAYOUT)
    )
    sampling = {
        "temperature": 0.5, "seed": 3, "max_tokens": 3, "min_tokens": 1, "logprobs": 2, "stop_token_ids": [7],
        "logit_bias": {"5": 1.5}, "top_p": 0.9, "top_k": 5, "ignore_eos": True, "allowed_token_ids": [5, 6, 700],
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "prompt_logprobs": 1, "bad_words": ["word"],
        "stop": ["xyz"],
    }  # fmt: skip
    structured = {"max_tokens": 4, "structured_outputs": {"regex": "[ab]+"}}
    router = {"address": ADDRESS, "key": KEY, "number": 4}
    send = call("remote_send", prompt=prompt, kv_addr_info=info, begin=0, end=48, seq_id="s")
    return [
        [call("prep_recv", prompt=prompt, seq_id="s", end=48, ttl=5.0), call("release", lease=LEASE)],
        [call("prep_recv", prompt=prompt, seq_id="s", end=-1, cache_salt="a"), call("abort", seq_id="s"), b"status {}"],
        [
            call("prep_recv", prompt=prompt, seq_id="s"),
            call("start_generate", prompt=prompt, seq_id="s", begin=48, sampling_params={"max_tokens": 2}),
        ],
        [call("start_generate", prompt=prompt[:20], seq_id="a", sampling_params=sampling, stream=False, priority=1)],
        [call("start_generate", prompt="some text", seq_id="a", output=[5, 6], sampling_params={"max_tokens": 5})],
        [call("start_generate", prompt=[5, 6, 7], seq_id="g", sampling_params=structured, stream=False)],
        [send, send],
        [call("remote_send", prompt=prompt[:48], kv_addr_info=info, begin=0, seq_id="s", sample=True,
              sampling_params=sampling)],
        [call("connect", router={"address": ADDRESS, "key": KEY}),
         call("start_generate", prompt=prompt, seq_id="d", router=router, sampling_params={"max_tokens": 3})],
        [call("connect", router={"address": "127.0.0.1:1", "key": "nobody"}), call("abort", seq_id="nobody")],
    ]  # fmt: skip
