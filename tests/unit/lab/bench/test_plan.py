"""A run's requests: how many, in which order, of which phase, and that a seed decides them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tercet.protocol import BadRequest
from tercet_lab.bench.workloads import Conversation, parse_phases, plan
from tercet_lab.bench.workloads.conversations import HashedWords

WORDS = HashedWords()


def planned(
    count: int | None, *texts: str, seed: int = 0, content: int | None = None, warmups: int = 0
) -> list[Conversation]:
    return list(plan(parse_phases(texts), count, WORDS, seed, content, warmups))


def requests(conversations: list[Conversation]) -> int:
    return sum(conversation.requests for conversation in conversations)


def trace(file: Path, count: int) -> str:
    rows = [{"timestamp": 1000 * i, "input_length": 5 + i, "output_length": 2} for i in range(count)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return f"mooncake,path={file}"


@pytest.mark.parametrize("count", [1, 7, 10])
def test_there_are_as_many_requests_as_asked_for(count: int) -> None:
    assert requests(planned(count, "sonnet")) == count
    assert requests(planned(count, "sessions,turns=4")) == count


def test_the_seed_decides() -> None:
    mix = "random,input_len_std=50+sessions,turns=2"
    assert planned(20, mix) == planned(20, mix)
    assert planned(20, mix) != planned(20, mix, seed=1)


def test_other_content_is_the_same_work() -> None:
    def work(conversations: list[Conversation]) -> list[tuple[int, int]]:
        return [(len(turn.tokens), turn.output_len) for c in conversations for turn in c.turns]

    one, other = (planned(20, "random,input_len_std=50+sonnet", content=content) for content in (1, 2))
    assert work(one) == work(other)
    assert one != other


def test_comparisons_of_recorded_texts_send_the_same_texts(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    talks = [[{"from": "human", "value": f"{i} b c d"}, {"from": "gpt", "value": "a b c d"}] for i in range(30)]
    file.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    one, other = (planned(10, f"sharegpt,path={file}", content=content) for content in (1, 2))
    assert [c.turns[0].text for c in one] == [c.turns[0].text for c in other]


def test_a_mix_keeps_its_weights() -> None:
    found = planned(3000, "random,input_len=1,weight=1+random,input_len=2,weight=3")
    shares = Counter(len(conversation.turns[0].tokens) for conversation in found)
    assert shares[2] / 3000 == pytest.approx(0.75, abs=0.03)


def test_the_workload_changes_half_way() -> None:
    found = planned(11, "random,input_len=1", "random,input_len=2")
    assert [(c.phase, len(c.turns[0].tokens)) for c in found] == [(0, 1)] * 6 + [(1, 2)] * 5


def test_a_session_is_cut_where_its_phase_ends() -> None:
    found = planned(10, "sessions,turns=3", "random")
    assert [c.requests for c in found if c.phase == 0] == [3, 2]
    assert [c.requests for c in found if c.phase == 1] == [1] * 5


def test_warm_up_comes_on_top_and_of_the_first_phase() -> None:
    found = planned(4, "random,input_len=1", "random,input_len=2", warmups=3)
    assert [c.phase for c in found] == [0] * 5 + [1] * 2


def test_a_whole_trace(tmp_path: Path) -> None:
    found = planned(None, trace(tmp_path / "t", 5))
    assert [(c.offset, len(c.turns[0].tokens)) for c in found] == [(float(i), 5 + i) for i in range(5)]


def test_a_trace_is_no_longer_than_it_is(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="the trace has 5 requests"):
        planned(6, trace(tmp_path / "t", 5))


def test_without_a_number_there_must_be_an_end() -> None:
    with pytest.raises(BadRequest, match="num-prompts"):
        planned(None, "sonnet")
