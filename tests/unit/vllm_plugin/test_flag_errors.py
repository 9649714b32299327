"""What vLLM's parser says of wrong flags, once it says it in a sentence."""

from __future__ import annotations

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tercet.protocol import BadRequest
from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--max-model-length", "3"], "unrecognized arguments: --max-model-length 3; did you mean --max-model-len?"),
        (["--zzz"], "unrecognized arguments: --zzz; `vllm serve --help=all` lists them"),
        (["--max-model-len", "many"], "argument --max-model-len: invalid int value: 'many'"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_wrong_flag_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    monkeypatch.setattr(FlexibleArgumentParser, "error", FlexibleArgumentParser.error)
    refuse_in_a_sentence()
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-model-len", type=int)
    with pytest.raises(BadRequest) as raised:
        parser.parse_args(given)
    assert raised.value.message == f"flags for vLLM: {says}"
    assert capfd.readouterr() == ("", "")
