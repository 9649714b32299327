"""What a wrong command line is told: one line that names the command whose help has the answer."""

from __future__ import annotations

import pytest

from tercet.cli import app

WRONG = [
    (["--nope"], "see tercet --help"),
    (["nothing"], "see tercet --help"),
    (["up", "--nope"], "see tercet up --help"),
    (["bench", "nothing"], "see tercet bench --help"),
    (["bench", "serve", "--nope"], "see tercet bench serve --help"),
    (["program", "set", "--nope"], "see tercet program set --help"),
]


@pytest.mark.parametrize(("line", "told"), WRONG, ids=[" ".join(line) for line, _ in WRONG])
def test_a_wrong_line_names_its_own_help(
    line: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tercet", *line])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
