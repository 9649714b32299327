"""For how long vLLM's processes look for messages before they sleep, and that none is missed."""

from __future__ import annotations

import pytest

from tercet.protocol import BadRequest
from tercet.settings.process_settings import spin_seconds


def test_engines_on_a_cpu_sleep_at_once_and_others_as_vllm_does() -> None:
    assert spin_seconds({}, on_cpu=True) == 0
    assert spin_seconds({}, on_cpu=False) is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_variable_decides(on_cpu: bool) -> None:
    assert spin_seconds({"TERCET_SPIN_SECONDS": "0.5"}, on_cpu) == 0.5


@pytest.mark.parametrize("given", ["", "soon", "-1", "nan", "inf"])
def test_what_is_no_duration_is_refused_by_name(given: str) -> None:
    with pytest.raises(BadRequest, match="TERCET_SPIN_SECONDS"):
        spin_seconds({"TERCET_SPIN_SECONDS": given}, on_cpu=True)
