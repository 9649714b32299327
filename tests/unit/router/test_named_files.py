"""Files that admin routes name: where they may be, and that answers tell nothing of what stands in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tercet.router.serve.plans import NamedFiles
from tercet.router.server import named_files
from tercet.settings import EngineAddress, RouterConfig

from .conftest import LiveRouter

SECRET = "SK_LIVE_51H8"
GOOD = """
async def main(request, fleet, *, times: int = 1):
    with fleet.pick() as engine:
        yield engine.start_generate(request)
"""
SCHEDULING = "plugins: []\nschedulingProfiles: [{name: mine}]\n"
NOT_OURS = [
    "/etc/passwd", "/etc/shadow", "/proc/1/fd/0", "/proc/self/environ", "/dev/zero", "/root/x.py", "/", "",
    "~root/.ssh/id_rsa", "~nobody-here/x.yaml", "a\0b", "x" * 5000, "../../../../etc/passwd", "/proc/self/fd/0",
]  # fmt: skip


def program_of(path: str) -> dict[str, Any]:
    return {"program": f"{path}:main"}


@pytest.mark.parametrize("path", NOT_OURS)
async def test_a_path_below_no_folder_is_not_looked_at(router: LiveRouter, tmp_path: Path, path: str) -> None:
    router.folders = [str(tmp_path)]
    calls = [
        ("/program", program_of(path)),
        ("/program", {"split": [{"program": f"{path}:main"}]}),
        ("/program", {"program": "data_parallel", "rules": [{"program": f"{path}:main", "model": "m"}]}),
        ("/program", {"program": "balanced", "args": {"decode_start": f"{path}:main"}}),
        ("/scheduling", {"file": path}),
        (
            "/scheduling",
            {"file": "x", "content": f"plugins: [{{type: {path!r}:main}}]\nschedulingProfiles: [{{name: a}}]"},
        ),
    ]
    async with router.client() as client:
        for where, body in calls:
            answer = await client.put(where, json=body)
            assert answer.status_code in (400, 403), (where, body, answer.text)
            assert "root:" not in answer.text
    assert router.service.routing.current.number == 1


async def test_links_and_dots_lead_out_of_no_folder(router: LiveRouter, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.py").write_text(GOOD)
    (inside / "link.py").symlink_to(tmp_path / "secret.py")
    (inside / "loop.py").symlink_to(inside / "loop.py")
    (tmp_path / "inside-not").mkdir()
    (tmp_path / "inside-not" / "x.py").write_text(GOOD)
    os.mkfifo(inside / "pipe.py")
    (inside / "mine.py").write_text(GOOD)
    router.folders = [str(inside)]
    async with router.client() as client:
        for path in ("link.py", "../secret.py", "../inside-not/x.py", "loop.py"):
            assert (await client.put("/program", json=program_of(f"{inside}/{path}"))).status_code == 403, path
        for path in ("pipe.py", "none.py", "."):
            assert (await client.put("/program", json=program_of(f"{inside}/{path}"))).status_code == 400, path
        assert (await client.put("/program", json=program_of(f"{inside}/mine.py"))).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [f"{SECRET}", f"{SECRET} = ", f"raise ValueError('{SECRET}')", f"import {SECRET}",
     f"async def main(r, f, *, {SECRET}=1): yield", f"async def main(r, f, *, x: {SECRET} = 1): yield",
     f"def main(): '{SECRET}'", f"raise SystemExit('{SECRET}')",
     f"root:x:0:{SECRET}", f"password: {SECRET}", f"plugins: {SECRET}", f"{SECRET}: [",
     f"plugins: [{{type: {SECRET}}}]\nschedulingProfiles: [{{name: a}}]",
     f"plugins: []\nschedulingProfiles: [{{name: a}}]\n{SECRET}: 1", f"{SECRET}: 1\n{SECRET}: 2"],
)  # fmt: skip
async def test_what_stands_in_a_file_is_for_the_log(
    router: LiveRouter, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text(text)
    path = str(tmp_path / "file")
    async with router.client() as client:
        for where, body in (
            ("/program", {**program_of(path), "args": {"y": "1"}}),
            ("/program", {"program": "balanced", "args": {"decode_start": f"{path}:main"}}),
            ("/scheduling", {"file": path}),
        ):
            answer = await client.put(where, json=body)
            is_function = body.get("program") == "balanced" and answer.status_code == 200
            assert is_function or answer.status_code == 400
            assert is_function or SECRET not in answer.text
    assert "cannot be used: " in caplog.text


async def test_contents_may_be_sent(router: LiveRouter) -> None:
    async with router.client() as client:
        body = {"program": "mine.py:main", "source": GOOD, "args": {"times": 2}}
        shown = await client.put("/program", json=body)
        assert shown.status_code == 200, shown.text
        assert shown.json()["source"] == GOOD
        assert (await router.ask())[0] == "mine.py:main"
        split = {"split": [{"program": "mine.py:main", "source": GOOD}, {"program": "other.py:main", "source": GOOD}]}
        assert (await client.put("/program", json=split)).status_code == 200
        sent = await client.put("/scheduling", json={"file": "mine.yaml", "content": SCHEDULING})
        assert (sent.status_code, sent.json()["file"], list(sent.json()["profiles"])) == (200, "mine.yaml", ["mine"])


async def test_what_is_wrong_with_sent_contents_is_told(router: LiveRouter) -> None:
    async with router.client() as client:
        answer = await client.put("/program", json={"program": "mine.py:main", "source": "nonsense"})
        assert (answer.status_code, "name 'nonsense' is not defined" in answer.text) == (400, True)
        answer = await client.put("/program", json={"program": "mine.py:other", "source": GOOD})
        assert "has no function other" in answer.text
        answer = await client.put("/scheduling", json={"file": "m", "content": "surprise: 1"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "surprise")
        answer = await client.put("/program", json={"program": "mine.py:main", "source": "x" * 1_000_001})
        assert (answer.status_code, answer.json()["error"]["param"]) in ((400, "source"), (413, None))
        for wrong in ({"source": GOOD, "split": [{"program": "auto"}]}, {"program": "no_file", "source": GOOD}):
            assert (await client.put("/program", json=wrong)).status_code == 400


async def test_one_name_for_two_sources_is_refused(router: LiveRouter) -> None:
    split = [{"program": "mine.py:main", "source": GOOD}, {"program": "mine.py:main", "source": GOOD + "#"}]
    async with router.client() as client:
        assert (await client.put("/program", json={"split": split})).status_code == 400


def test_what_the_command_names_may_be_named_again(tmp_path: Path) -> None:
    for name in ("mine.py", "other.py", "s.yaml"):
        (tmp_path / name).write_text(GOOD if name.endswith("py") else SCHEDULING)
    config = RouterConfig(
        engines=(EngineAddress("e", "http://e"),), program=f"{tmp_path}/mine.py:main", scheduling=f"{tmp_path}/s.yaml"
    )
    files = named_files(config)
    assert files._locate(f"{tmp_path}/mine.py", "program") == tmp_path / "mine.py"
    assert files.load_scheduling(f"{tmp_path}/s.yaml").profiles
    with pytest.raises(Exception, match="admin-folder"):
        files._locate(f"{tmp_path}/other.py", "program")
    assert NamedFiles([str(tmp_path)])._locate(f"{tmp_path}/other.py", "program")
