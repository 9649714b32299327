"""A decode engine without prefix caching: what is pushed to it is used once, rightly, and forgotten."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tercet.protocol import Request
from tercet.wire.client import HttpEngine

from .conftest import running_engine, settled
from .prompts import BLOCK, alone, prompt_of

pytestmark = pytest.mark.verifies("engines without a prefix cache")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine of its own, with the shared fleet's model and data type."""
    flags = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "256")
    with running_engine(tmp_path_factory.mktemp("uncached"), "uncached", *flags) as found:
        yield found


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("length", [5, BLOCK, 3 * BLOCK + 40])
async def test_pushed_kv_is_used_once(prefill: HttpEngine, url: str, length: int) -> None:
    prompt = prompt_of(length)
    expected = await alone(prefill.url, prompt)
    async with HttpEngine("uncached", url) as decode:
        for _ in range(2):
            request = Request(
                seq_id=uuid.uuid4().hex, prompt=tuple(prompt), sampling_params={"temperature": 0, "max_tokens": 12}
            )
            async with decode.prep_recv(request) as space:
                assert space.matched_len == 0  # the second time too
                sent = await prefill.remote_send(request, space, 0, sample=True)
                assert sent.first is not None
                outputs = [o async for o in decode.start_generate(request, sent.end, sent.first.token_ids)]
            assert outputs[0].usage is not None
            assert (outputs[0].usage.cached, outputs[0].usage.received) == (0, length)
            assert [*sent.first.token_ids, *(token for o in outputs for token in o.token_ids)] == expected
            await settled(decode)


@pytest.mark.usefixtures("nothing_leaks")
async def test_what_is_reserved_and_not_used_is_given_back(prefill: HttpEngine, url: str) -> None:
    request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(300)))
    async with HttpEngine("uncached", url) as decode:
        async with decode.prep_recv(request) as space:
            await prefill.remote_send(request, space, 0)
        await settled(decode)
