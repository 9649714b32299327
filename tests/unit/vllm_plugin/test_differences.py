"""What differs between versions of vLLM: each difference is in the versions that it names, and ends with the last."""

from __future__ import annotations

import pytest

from tercet.vllm_plugin import differences
from tercet.vllm_plugin.differences import DIFFERENCES, Difference
from tercet.vllm_plugin.hooks import MINORS, Has, vllm_version

INSTALLED = next(minor for minor in MINORS if vllm_version().startswith(f"{minor}."))


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.what)
def test_a_difference_is_in_the_versions_up_to_its_last(difference: Difference) -> None:
    assert difference.is_here == (MINORS.index(INSTALLED) <= MINORS.index(difference.last))


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.what)
def test_it_ends_within_the_supported_versions(difference: Difference) -> None:
    assert difference.last in MINORS[:-1], f"delete the branches for this: {difference.what}"


def test_all_are_listed() -> None:
    declared = [each for each in vars(differences).values() if isinstance(each, Difference)]
    assert declared == list(DIFFERENCES)


def test_it_is_told_by_the_code_of_vllm() -> None:
    assert Difference("", "0.32", Has("json:JSONDecoder", "shape")).is_here
    assert not Difference("", "0.32", Has("json:JSONDecoder", "decode")).is_here


def test_the_module_of_options_is_the_installed_ones() -> None:
    assert callable(differences.cli_args().make_arg_parser)
