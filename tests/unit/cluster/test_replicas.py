"""Fleets whose engines are the data-parallel ranks of one group."""

from __future__ import annotations

import pytest

from tercet.cluster.engine_command import engine_argv
from tercet.cluster.local import engine_specs
from tercet.cluster.up_config import UpConfig
from tercet.cluster.vllm_flags import is_group, rank_flags, value_of
from tercet.protocol import BadRequest


@pytest.mark.parametrize("args", [(), ("--data-parallel-size", "1"), ("--max-num-seqs", "2")], ids=str)
def test_engines_by_themselves_are_told_nothing(args: tuple[str, ...]) -> None:
    assert not is_group(args)
    assert rank_flags(args, 3, "127.0.0.1") == [()] * 3


@pytest.mark.parametrize("args", [("--data-parallel-size", "3"), ("--data_parallel_size=3",), ("-dp", "3")], ids=str)
def test_each_engine_is_a_rank_and_they_meet_at_one_place(args: tuple[str, ...]) -> None:
    specs = engine_specs(UpConfig(prefill=1, decode=2, engine_args=(*args, "--enable-expert-parallel")), "m")
    commands = [engine_argv(spec) for spec in specs]
    assert [value_of(argv[1:], "--data-parallel-rank") for argv in commands] == ["0", "1", "2"]
    assert {value_of(argv[1:], "--data-parallel-address") for argv in commands} == {"127.0.0.1"}
    assert len({value_of(argv[1:], "--data-parallel-rpc-port") for argv in commands}) == 1
    assert all("--enable-expert-parallel" in argv for argv in commands)
    assert len({spec.port for spec in specs}) == 3


@pytest.mark.parametrize("args", [("-dp", "2"), ("-dp", "4"), ("-dp", "x"), ("-dp", "3", "-dpn", "0")], ids=str)
def test_a_group_of_other_engines_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        engine_specs(UpConfig(prefill=1, decode=2, engine_args=args), "m")
    assert caught.value.param == "engine-args"
