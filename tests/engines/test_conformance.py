"""vLLM engines with the plugin pass the conformance suite of the verbs, one of them as the other one's peer."""

from __future__ import annotations

import pytest

from tercet_checks.conformance import run_checks

from .conftest import Fleet

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("verbs")]
NEED_A_SECRET = {"strangers-are-refused", "proofs-are-for-one-call"}


async def test_vllm_engines_conform(fleet: Fleet) -> None:
    found = await run_checks(fleet.engine_url("decode"), fleet.engine_url("prefill"), "", 60.0)
    failed = [f"{each.check}: {each.what}\n  {each.sent}\n  {each.came}" for each in found if each.state == "failed"]
    assert not failed, "\n".join(failed)
    assert {each.check for each in found if each.state == "skipped"} == NEED_A_SECRET
