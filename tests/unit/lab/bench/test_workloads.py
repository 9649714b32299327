"""What requests ask: lengths, what they share, recorded files, and how workloads are written; how many there are, in
which order, and when they are due.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest
from tercet_bench.traffic import fit_text
from tercet_lab.bench.workloads import Conversation, Workload, parse_phase, parse_phases, plan
from tercet_lab.bench.workloads.conversations import (
    INSTRUCTION,
    Arrival,
    Draw,
    HashedWords,
    Lines,
    arrival_times,
    gaps_of,
    lengths,
    replayed,
    sonnet_lines,
)
from tercet_lab.bench.workloads.recorded import read_sharegpt

WORDS = HashedWords()


def workload(text: str) -> Workload:
    (kind,) = parse_phase(text).mix
    return kind


def some(text: str, count: int, shape: int = 0, content: int = 0) -> list[Conversation]:
    draw = Draw(WORDS, Random(shape), Random(content), str(content))
    return list(islice(workload(text).conversations(draw), count))


def prompts(conversations: list[Conversation]) -> list[tuple[int, ...]]:
    return [tuple(conversation.turns[0].tokens) for conversation in conversations]


def write(file: Path, *lines: object) -> Path:
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def complaint(text: str) -> str:
    with pytest.raises(BadRequest) as caught:
        some(text, 1)
    assert "\n" not in caught.value.message
    return caught.value.message


# Lengths


@pytest.mark.parametrize("kind", ["sonnet", "random"])
def test_lengths_are_exact_without_a_deviation(kind: str) -> None:
    found = some(f"{kind},input_len=200,output_len=9", 20)
    assert {(len(c.turns[0].tokens), c.turns[0].output_len) for c in found} == {(200, 9)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sonnet", "random"])
def test_lengths_are_normal_with_mean_and_deviation(kind: str) -> None:
    found = some(f"{kind},input_len=100,input_len_std=10,output_len=50,output_len_std=5", 1500)
    lengths = np.array([(len(c.turns[0].tokens), c.turns[0].output_len) for c in found])
    np.testing.assert_allclose(lengths.mean(axis=0), (100, 50), rtol=0.02)
    np.testing.assert_allclose(lengths.std(axis=0), (10, 5), rtol=0.1)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
@pytest.mark.parametrize(
    ("mean", "dev"),
    [(512, 1024), (256, 512), (128, 512), (512, 512), (512, 100), (7, 30), (1, 5), (1.5, 1e300), (9, 0)],
)
def test_lengths_have_the_mean_that_was_asked_for(
    kind: Literal["normal", "lognormal"], mean: float, dev: float
) -> None:
    chance, drawing = Random(7), lengths(kind, mean, dev)
    found = np.array([drawing.draw(chance) for _ in range(40_000)])
    assert found.min() >= 1
    # Five standard errors, and what rounding to whole tokens moves.
    assert abs(found.mean() - mean) <= 5 * found.std() / len(found) ** 0.5 + 0.02 * mean


def test_no_length_is_below_one() -> None:
    found = some("random,input_len=2,input_len_std=30,output_len=1,output_len_std=30", 500)
    assert min(min(len(c.turns[0].tokens), c.turns[0].output_len) for c in found) == 1


# Sonnets


def test_a_sonnet_prompt_is_an_instruction_and_lines_of_the_sonnets() -> None:
    (prompt,) = prompts(some("sonnet,input_len=120,output_len=77", 1))
    ask = WORDS.encode(INSTRUCTION.format(output_len=77))
    words = {token for line in sonnet_lines() for token in WORDS.encode(line)}
    assert list(prompt[: len(ask)]) == ask
    assert set(prompt[len(ask) :]) <= words


def test_a_short_sonnet_prompt_has_no_instruction() -> None:
    (prompt,) = prompts(some("sonnet,input_len=5", 1))
    assert len(prompt) == 5
    assert list(prompt) != WORDS.encode(INSTRUCTION.format(output_len=128))[:5]


def test_no_line_comes_again_before_all_came() -> None:
    class Numbered(HashedWords):
        def encode(self, text: str) -> list[int]:
            return [sonnet_lines().index(text.rstrip("\n"))]

    lines = sonnet_lines()
    found = Lines(Numbered()).draw(2 * len(lines), Random(5))
    # A few lines of the sonnets are the same; they have the number of the first.
    first, second = sorted(found[: len(lines)]), sorted(found[len(lines) :])
    assert first == second == sorted(lines.index(line) for line in lines)
    assert found[: len(lines)] != found[len(lines) :]


# What is shared


def test_requests_of_a_shared_prefix_share_it_and_no_more() -> None:
    found = some("shared_prefix,prefixes=3,prefix_len=64,input_len=32", 60)
    begins: dict[str | None, set[tuple[int, ...]]] = {}
    for conversation in found:
        begins.setdefault(conversation.group, set()).add(tuple(conversation.turns[0].tokens[:64]))
    assert len(begins) == 3
    assert all(len(prefixes) == 1 for prefixes in begins.values())
    assert len({prompt[64:] for prompt in prompts(found)}) == 60


def test_sessions_share_their_system_prompt_and_pause_between_turns() -> None:
    found = some("sessions,turns=3,system_len=40,input_len=16,output_len=8,think_time=2", 400)
    assert {len(c.turns) for c in found} == {3}
    assert len({prompt[:40] for prompt in prompts(found)}) == 1
    assert {len(turn.tokens) for c in found for turn in c.turns[1:]} == {16}
    assert {c.turns[0].think_time for c in found} == {0.0}
    assert np.mean([turn.think_time for c in found for turn in c.turns[1:]]) == pytest.approx(2.0, rel=0.15)
    assert len({c.group for c in found}) == 400


def test_random_tokens_are_text_and_share_nothing() -> None:
    class Special(HashedWords):
        @property
        def special(self) -> frozenset[int]:
            return frozenset(range(0, 32_000, 2))

    draw = Draw(Special(), Random(0), Random(0), "0")
    found = prompts(list(islice(workload("random,input_len=100").conversations(draw), 50)))
    assert all(token % 2 for prompt in found for token in prompt)
    assert len({prompt[:3] for prompt in found}) == 50


@pytest.mark.parametrize("kind", ["sonnet,input_len_std=99", "random,input_len_std=99", "shared_prefix", "sessions"])
def test_shape_decides_the_work_and_content_the_words(kind: str) -> None:
    def work(conversations: list[Conversation]) -> list[tuple[int, int, float]]:
        return [(len(t.tokens), t.output_len, t.think_time) for c in conversations for t in c.turns]

    one, same, other = some(kind, 20), some(kind, 20), some(kind, 20, content=1)
    assert one == same
    assert work(one) == work(other)
    assert not set(prompts(one)) & set(prompts(other))


# ShareGPT


def said(*texts: str) -> dict[str, object]:
    sides = ("human", "gpt")
    return {"conversations": [{"from": sides[i % 2], "value": text} for i, text in enumerate(texts)]}


LONG = "one two three four five"


def test_sharegpt(tmp_path: Path) -> None:
    file = write(tmp_path / "s.json", json.dumps([said(LONG, "a b c d e f", "again one two three", "z")]))
    (first,) = some(f"sharegpt,path={file}", 1)
    assert [(turn.text, turn.output_len) for turn in first.turns] == [(LONG, 6)]
    (both,) = some(f"sharegpt,path={file},turns=5,think_time=2", 1)
    assert [(turn.output_len, turn.think_time) for turn in both.turns] == [(6, 0.0), (1, 2.0)]
    (fixed,) = some(f"sharegpt,path={file},output_len=30", 1)
    assert fixed.turns[0].output_len == 30


def test_sharegpt_as_lines_of_openai_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": LONG}, {"role": "assistant",
                "content": LONG}]  # fmt: skip
    (found,) = some(f"sharegpt,path={write(tmp_path / 's.jsonl', {'messages': messages}, '')}", 1)
    assert (found.turns[0].text, found.turns[0].output_len) == (LONG, 5)


def test_sharegpt_leaves_out_what_is_too_short_too_long_or_no_pair(tmp_path: Path) -> None:
    odd = [
        said("short", LONG),
        said(LONG, "short"),
        said("w " * 50, LONG),
        said(LONG),
        {"id": 3},
        "text",
        said(LONG, LONG),
    ]
    file = write(tmp_path / "s.json", json.dumps(odd))
    found = some(f"sharegpt,path={file},max_input_len=40", 3)
    assert {conversation.turns[0].text for conversation in found} == {LONG}
    assert "fits the limits" in complaint(f"sharegpt,path={file},max_input_len=2")


def test_sharegpt_files_that_are_none(tmp_path: Path) -> None:
    assert "path is missing" in complaint("sharegpt")
    assert "cannot read" in complaint(f"sharegpt,path={tmp_path / 'none.json'}")
    assert "is not JSON" in complaint(f"sharegpt,path={write(tmp_path / 'a.json', '[{')}")
    assert "line 2" in complaint(f"sharegpt,path={write(tmp_path / 'b.json', {'a': 1}, '{')}")
    assert "no conversation" in complaint(f"sharegpt,path={write(tmp_path / 'c.json', '[]')}")


# Traces


def row(at: float, length: int, answer: int, *ids: int) -> dict[str, object]:
    return {"timestamp": at, "input_length": length, "output_length": answer, "hash_ids": ids}


def test_mooncake_blocks_are_shared_as_recorded(tmp_path: Path) -> None:
    rows = (row(2000, 1100, 5, 1, 2, 3), row(500, 1024, 7, 1, 2), row(2500, 1000, 9, 1, 9))
    found = some(f"mooncake,path={write(tmp_path / 't.jsonl', *rows)}", 9)
    assert [(c.offset, len(c.turns[0].tokens), c.turns[0].output_len) for c in found] == [
        (0.5, 1024, 7), (2.0, 1100, 5), (2.5, 1000, 9),
    ]  # fmt: skip
    first, second, third = prompts(found)
    assert first == second[:1024]
    assert third[:512] == first[:512]
    assert third[512:520] != first[512:520]


def test_mooncake_limits_and_rows_without_hashes(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", row(0, 900, 800), row(1, 10, 3))
    found = some(f"mooncake,path={file},max_input_len=600,max_output_len=50", 9)
    assert [(len(c.turns[0].tokens), c.turns[0].output_len) for c in found] == [(600, 50), (10, 3)]


def test_azure(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:47.2500000,80,20",
        "2023-11-16 18:15:46.0000000,374,44", "2023-11-16 18:15:48.0000000,5,0",
    )  # fmt: skip
    found = some(f"azure,path={file},max_input_len=300", 9)
    assert [(len(c.turns[0].tokens), c.turns[0].output_len) for c in found] == [(300, 44), (80, 20)]
    assert found[0].offset is not None
    assert found[1].offset == found[0].offset + 1.25


def test_burstgpt(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = (
        "45.5,ChatGPT,472,18,490,API log",
        "5,GPT-4,1087,230,1317,Conversation log",
        "118,ChatGPT,417,0,417,API log",
    )
    found = some(f"burstgpt,path={write(tmp_path / 't.csv', head, *rows)},max_output_len=100", 9)
    assert [(c.offset, len(c.turns[0].tokens), c.turns[0].output_len) for c in found] == [
        (5.0, 1087, 100), (45.5, 472, 18),
    ]  # fmt: skip
    assert "line 2" in complaint(f"burstgpt,path={write(tmp_path / 'b', head, 'nan,x,1,1,2,x')}")


def test_chats_whose_content_is_a_list_of_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def chat(*parts: Any, answer: Any = "because it is what it is now") -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]}

    texts = [{"type": "text", "text": "why is the sky"}, {"type": "input_text", "text": " so blue"}, " today"]
    answer = [{"type": "output_text", "text": "because it is what it is now"}]
    whole = [("why is the sky so blue today", "because it is what it is now")]
    assert read_sharegpt(str(write(tmp_path / "a", chat(*texts, answer=answer)))) == [whole]
    assert not caplog.text
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    mixed = write(tmp_path / "b", chat(*texts), chat(*texts, picture), chat(7), chat({"type": "text", "text": None}))
    assert read_sharegpt(str(mixed)) == [whole]
    assert "3 messages have parts that are not text (7, image_url, text); they are left out" in caplog.text
    assert "no conversation" in complaint(f"sharegpt,path={write(tmp_path / 'c', chat(picture))}")
    assert "(image_url)" in complaint(f"sharegpt,path={tmp_path / 'c'}")
    # What follows a picture depends on it.
    later = chat(*texts)["messages"] + chat(picture)["messages"] + chat(*texts)["messages"]
    assert read_sharegpt(str(write(tmp_path / "d", {"messages": later}))) == [whole]


@pytest.mark.parametrize("lines", [("{0}", "{1}"), ("\ufeff{0}\r", "\r", "{1}\r"), ("{1}", "{0}")])
def test_mooncake_rows_without_output_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: tuple[str, ...]
) -> None:
    file = tmp_path / "t"
    text = "\n".join(lines).replace("{0}", json.dumps(row(5, 10, 0))).replace("{1}", json.dumps(row(3, 10, 2)))
    file.write_bytes(text.encode())
    assert len(some(f"mooncake,path={file}", 9)) == 1
    assert "1 rows have a length of 0; they are left out" in caplog.text
    assert "no requests" in complaint(f"mooncake,path={write(tmp_path / 'z', row(0, 10, 0))}")


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
@pytest.mark.parametrize("value", ["-1", "null", '"5"', "1e999", "NaN", "1" + "0" * 30, "1" + "0" * 400, "true", "[-1]",
                                   "[1.5]", "[[]]", "{}", None])  # fmt: skip
def test_a_mooncake_row_with_a_wrong_value_names_line_and_field(tmp_path: Path, field: str, value: str | None) -> None:
    if field == "hash_ids" and value is None:
        return
    fields = {"timestamp": "0", "input_length": "10", "output_length": "2", "hash_ids": "[]"}
    fields = {**fields, field: value} if value is not None else {n: v for n, v in fields.items() if n != field}
    line = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
    said = complaint(f"mooncake,path={write(tmp_path / 't', row(0, 10, 3), line)}")
    assert "line 2" in said
    assert field in said or "JSON" in said or "number" in said.lower()


def test_mooncake_ids_that_do_not_fit_the_block_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "t", row(0, 1000, 3, 1, 2), row(0, 1000, 3, 1), row(0, 1000, 3, 1, 2, 3), row(0, 1000, 3))
    assert [len(prompt) for prompt in prompts(some(f"mooncake,path={file}", 4))] == [1000] * 4
    assert "2 rows have hash_ids that are not one for each 512 tokens (block)" in caplog.text


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "z.gz").write_bytes(b"\x1f\x8b\x08\x00" + bytes(20))
    for kind in ("mooncake", "sharegpt", "azure", "burstgpt"):
        assert "cannot read" in complaint(f"{kind},path={tmp_path}")
        assert "unpack it first" in complaint(f"{kind},path={tmp_path / 'z.gz'}")


# What str.splitlines takes for an end of a line, and JSON for a character of a text.
ODD_ENDS = "\u2028\u2029\x85"


def test_only_a_line_feed_ends_a_line_of_json(tmp_path: Path) -> None:
    said = f"one{ODD_ENDS}two three four five six"
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": f"fine{ODD_ENDS}then so it is"}]
    line = json.dumps({"messages": messages}, ensure_ascii=False)
    file = tmp_path / "s.jsonl"
    file.write_text(f"{line}\r\n\n{line}\n", encoding="utf-8", newline="")
    assert len(some(f"sharegpt,path={file}", 2)) == 2
    row_of = {"timestamp": 0, "input_length": 10, "output_length": 2, "note": ODD_ENDS}
    file.write_text((json.dumps(row_of, ensure_ascii=False) + "\n") * 2, encoding="utf-8")
    assert len(some(f"mooncake,path={file}", 9)) == 2
    file.write_text("\n" * 2 + "{", encoding="utf-8")
    assert "line 3" in complaint(f"mooncake,path={file}")


def test_lines_that_are_nested_too_deeply_are_named(tmp_path: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    for kind in ("mooncake", "sharegpt"):
        found = complaint(f"{kind},path={write(tmp_path / 'd', deep)}")
        assert "line 1" in found or "is not JSON" in found


def test_a_row_of_a_table_may_have_any_text(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens,note\n"
        f'2023-11-16 18:15:46,10,2,"a{ODD_ENDS}\nb"\n2023-11-16 18:15:47,11,3,c\n', encoding="utf-8"
    )  # fmt: skip
    assert len(some(f"azure,path={file}", 9)) == 2
    huge = "x" * 200_000
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens,note\n2023-11-16 18:15:46,10,2,{huge}\n")
    assert "field larger than" in complaint(f"azure,path={file}")


def test_hashed_blocks_differ_wherever_their_text_begins(tmp_path: Path) -> None:
    ids = (*range(40_000, 40_300), 2**40, 2**40 + 1)
    (prompt,) = prompts(some(f"mooncake,block=8,path={write(tmp_path / 't', row(0, 8 * len(ids), 1, *ids))}", 1))
    assert len({prompt[at : at + 8] for at in range(0, len(prompt), 8)}) == len(ids)
    assert "block" in complaint(f"mooncake,block=2,path={tmp_path / 't'}")


def test_broken_traces_name_the_line(tmp_path: Path) -> None:
    good = row(0, 10, 3)
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert "line 2" in complaint(f"mooncake,path={write(tmp_path / 'a', good, row(0, 0, 3))}")
    assert "no requests" in complaint(f"mooncake,path={write(tmp_path / 'b', '')}")
    assert "the header lacks GeneratedTokens" in complaint(
        f"azure,path={write(tmp_path / 'c', 'TIMESTAMP,ContextTokens')}"
    )
    assert "line 3" in complaint(f"azure,path={write(tmp_path / 'd', head, '2023-11-16 18:15:46,1,1', 'soon,1,1')}")
    assert "line 2" in complaint(f"azure,path={write(tmp_path / 'e', head, '2023-11-16 18:15:46,-1,1')}")


# How they are written


def test_a_mix_is_joined_with_plus_and_paths_may_contain_it() -> None:
    kinds = parse_phase("sonnet,input-len=3+mooncake,path=/a+b/sonnets+random,weight=2").mix
    assert [(type(kind).__name__, kind.weight) for kind in kinds] == [
        ("Sonnet", 1),
        ("Mooncake", 1),
        ("RandomTokens", 2),
    ]
    assert getattr(kinds[1], "path") == "/a+b/sonnets"  # noqa: B009


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sonet", "did you mean sonnet?"),
        ("poem", "the kinds are sonnet"),
        ("sonnet,input_length=4", "did you mean input_len?"),
        ("sonnet,input_len", "is not KEY=VALUE"),
        ("sonnet,input_len=0", "input_len: must be at least 1, is 0"),
        ("sonnet,input_len=long", "input_len"),
        ("random,weight=0", "weight"),
        ("random,weight=inf", "weight"),
        ("sessions,think_time=-1", "think_time"),
    ],
)
def test_what_is_written_wrong_is_named(text: str, expected: str) -> None:
    assert expected in complaint(text)


# Text


def test_text_is_fitted_to_an_exact_length_though_tokens_merge() -> None:
    class Merging(HashedWords):
        """Two words make one token, as when the parts of a word meet."""

        def encode(self, text: str) -> list[int]:
            return super().encode(text)[::2]

    vocabulary = Merging()
    for length in (1, 7, 30):
        text = fit_text(vocabulary, list(range(30)), length)
        assert len(vocabulary.encode(text)) == length


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


MANY = 20_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_their_gamma_process(burstiness: float) -> None:
    found = np.array(list(islice(gaps_of("gamma", 5.0, burstiness, Random(1)), MANY)))
    variation = found.std() / found.mean()
    assert found.mean() == pytest.approx(0.2, rel=0.05)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_have_the_quantiles_of_the_exponential_distribution() -> None:
    found = np.array(list(islice(gaps_of("poisson", 2.0, 1.0, Random(2)), MANY)))
    shares = np.array([0.1, 0.5, 0.9, 0.99])
    np.testing.assert_allclose(np.quantile(found, shares), -np.log(1 - shares) / 2.0, rtol=0.08)


def test_counts_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    times = np.array(arrival_times(MANY, "poisson", 10.0, 1.0, Random(3)))
    counts, _ = np.histogram(times, bins=np.arange(0, math.floor(times[-1])))
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


def test_a_constant_rate_is_constant() -> None:
    assert arrival_times(4, "constant", 4.0, 1.0, Random(0)) == [0.0, 0.25, 0.5, 0.75]


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, "poisson", math.inf, 1.0, Random(0)) == [0.0, 0.0, 0.0]


def test_only_gamma_takes_the_burstiness() -> None:
    half, one = (arrival_times(9, "gamma", 2.0, burstiness, Random(4)) for burstiness in (0.5, 1.0))
    assert half != pytest.approx(one)
    half, poisson = (arrival_times(9, "poisson", 2.0, burstiness, Random(4)) for burstiness in (0.5, 1.0))
    assert half == poisson == pytest.approx(one)


@given(st.integers(0, 50), st.floats(0.01, 100), st.floats(0.1, 10), st.integers())
def test_times_begin_at_zero_never_go_back_and_depend_on_the_seed_alone(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, "gamma", rate, burstiness, Random(seed))
    assert len(times) == count
    assert times == sorted(times)
    assert times[:1] == [0.0][:count]
    assert times == arrival_times(count, "gamma", rate, burstiness, Random(seed))


def test_another_seed_gives_other_times() -> None:
    assert arrival_times(5, "poisson", 1.0, 1.0, Random(1)) != arrival_times(5, "poisson", 1.0, 1.0, Random(2))


def test_a_trace_is_replayed_from_zero_on() -> None:
    assert replayed([12.0, 10.0, 10.5]) == [0.0, 0.5, 2.0]


@given(st.lists(st.integers(0, 10**6), min_size=2).filter(lambda times: len(set(times)) > 1), st.floats(0.1, 100))
def test_stretching_a_trace_changes_its_rate_and_keeps_its_bursts(recorded: list[int], rate: float) -> None:
    original, stretched = np.array(replayed(recorded)), np.array(replayed(recorded, rate))
    assert (len(recorded) - 1) / stretched[-1] == pytest.approx(rate)
    np.testing.assert_allclose(stretched / stretched[-1], original / original[-1])


def test_a_trace_without_extent_fits_no_rate() -> None:
    assert replayed([3.0, 3.0]) == [0.0, 0.0]
    assert replayed([3.0, 4.0], math.inf) == [0.0, 0.0]
    with pytest.raises(BadRequest, match="request-rate"):
        replayed([3.0, 3.0], 1.0)


@pytest.mark.parametrize("rate", [1e-300, 1e-9, 5e-324])
@pytest.mark.parametrize("arrivals", ["gamma", "constant"])
def test_a_rate_at_which_a_run_would_not_end_is_refused(rate: float, arrivals: Arrival) -> None:
    with pytest.raises(BadRequest, match="higher rate") as caught:
        arrival_times(6, arrivals, rate, 1.0, Random(0))
    assert caught.value.param == "request-rate"


@pytest.mark.parametrize(("recorded", "rate"), [([0.0, 1e300], None), ([0.0, 1e8], 1.0), ([0.0, 1.0], 1e-300)])
def test_a_trace_in_which_a_run_would_not_end_is_refused(recorded: list[float], rate: float | None) -> None:
    with pytest.raises(BadRequest, match="higher rate"):
        replayed(recorded, rate)


@pytest.mark.parametrize(
    ("rate", "burstiness", "field"),
    [(0, 1, "request-rate"), (-1, 1, "request-rate"), (math.nan, 1, "request-rate"), (1, 0, "burstiness")],
)
def test_senseless_processes_are_refused(rate: float, burstiness: float, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        arrival_times(3, "gamma", rate, burstiness, Random(0))
    assert caught.value.param == field
