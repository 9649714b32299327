"""The examples of docs/scheduling.md work, and its tables name every plugin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tercet.decisions.scheduling.assembly import BUILT_IN
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import load_program, outputs_of
from tests.unit.fakes import FakeEngine

from .builders import Bench, View, listed, loaded, request_of

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "scheduling.md").read_text()


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_file_loads(tmp_path: Path) -> None:
    (text,) = examples("yaml")
    assert set(loaded(tmp_path, text).profiles) == {"prefill", "decode"}


def test_the_scorer_of_ones_own_scores(tmp_path: Path) -> None:
    (source,) = (text for text in examples("python") if "class SameZone" in text)
    (tmp_path / "mine.py").write_text(source)
    text = "plugins: [{type: mine.py:SameZone, name: z, parameters: {zone: x}}]\n"
    made = loaded(tmp_path, text + "schedulingProfiles: [{name: p, plugins: [{pluginRef: z}]}]")
    bench = Bench(View("a", labels={"zone": "x"}), View("b"))
    ((scorer, _),) = made.profiles["p"].scorers
    assert listed(scorer.score(bench.decision(), bench.engines)) == [1, 0]


@pytest.mark.parametrize(("length", "verbs"), [(100, ["prep_recv", "start_generate"]), (400, ["remote_send"])])
async def test_the_program_decides_between_one_engine_and_two(tmp_path: Path, length: int, verbs: list[str]) -> None:
    (source,) = (text for text in examples("python") if "conditional" in text)
    (tmp_path / "mine.py").write_text(source)
    (text,) = examples("yaml")
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    members = [Member("p", "", "prefill", prefill), Member("d", "", "decode", decode)]
    fleet = EngineFleet(members, scheduling=loaded(tmp_path, text))
    program = load_program(f"{tmp_path / 'mine.py'}:conditional")
    assert [out async for out in outputs_of(program(request_of(*range(length)), FleetView(fleet)))]
    assert (prefill.verbs or decode.verbs) == verbs


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_every_plugin_and_each_of_its_parameters_is_there(kind: str) -> None:
    assert f"`{kind}`" in PAGE
    for parameter in BUILT_IN[kind].__struct_encode_fields__:
        assert parameter in PAGE
