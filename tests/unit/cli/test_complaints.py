"""What a wrong command line is told: one line that names what is wrong with it, or whose help has the answer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tercet.cli import app

FILES = {
    "unknown.yaml": "prefil: 2\n",
    "kind.yaml": "prefill: two\n",
    "list.yaml": "[1, 2]\n",
    "syntax.yaml": "a: [1,\n",
    "empty.json": "{}",
    "text.json": "nonsense",
    "mine.py": "async def p(request, fleet, *, share: float = 0.5):\n    yield\ndef no(request, fleet):\n    pass\n",
    "role.yaml": "without-role: maybe\n",
    "syntax.py": "def (\n",
}
SIMULATED = "--simulate llama-3.1-8b-h100-tp1 --port 0"
# A command, and how its complaint begins.
WRONG = [
    ("--nope", "No such option: --nope"),
    ("nothing", "No such command 'nothing'"),
    ("up --nope", "No such option: --nope"),
    ("bench nothing", "No such command 'nothing'"),
    ("bench serve --nope", "No such option: --nope"),
    ("program --nope", "No such option: --nope"),
    ("up --simulate --port 8412", "--simulate: needs a value, and --port follows it"),
    ("up --port 0 --model --help", "--model: needs a value, and --help follows it"),
    ("engines add a http://h:1 --role --url", "--role: needs a value, and --url follows it"),
    (f"up {SIMULATED} smollm2", "vLLM flags after --: 'smollm2' cannot be used with simulated engines"),
    ("up --port 0 smollm2", "vLLM flags after --: 'smollm2' is not a flag of vLLM"),
    ("status --url nowhere", "--url: 'nowhere' is not a URL"),
    ("status --url http://", "--url: 'http://' is not a URL"),
    ("status --url http://127.0.0.1:99999", "--url: "),
    ("chat --url ftp://x", "--url: 'ftp://x' is not a URL"),
    ("chat --max-tokens 0", "--max-tokens: must be at least 1, is 0"),
    ("chat --temperature hot", "--temperature: must be a number, is 'hot'"),
    ("down --port x", "--port: must be a whole number, is 'x'"),
    ("store --port 0.5", "--port: must be a whole number, is 0.5"),
    ("top --port 70000", "--port: must be at most 65535, is 70000"),
    ("down --all --port 8000", "--all: cannot be combined with --port"),
    ("status --url x", "--url: "),
    ("engines add a", "Missing argument 'ENGINE_URL'"),
    ("engines add a nowhere", "ENGINE_URL: 'nowhere' is not a URL"),
    ("engines add a http://me:pw@10.0.0.7:8001", "ENGINE_URL: must not have a user or password"),
    ("router --engine http://me:pw@10.0.0.7:8001", "--engine: url: must not have a user or password"),
    ("sidecar --engine http://me:pw@10.0.0.7:8001", "--engine: must not have a user or password"),
    ("engines add a http://h:1 --role cook", "--role: 'cook' is not one of 'prefill', 'decode', 'both'"),
    ("engines role a cook", "role: 'cook' is not one of 'prefill', 'decode', 'both'"),
    ("engines drain a --undo --wait", "--wait: "),
    ("program --program-arg a=1", "--program-arg: needs PROGRAM"),
    ("program a --sticky x", "--sticky: needs a split"),
    ("program mine.py", "PROGRAM: name a function: mine.py:p\n"),
    ("program syntax.py", "PROGRAM: syntax.py cannot be read as Python"),
    ("up --port 0 --program mine.py", "--program: name a function: mine.py:p\n"),
    ("up --port 0 --program none.py", "--program: there is no file none.py"),
    ("up --port 0 --model mine.py", "--model: "),
    ("sim --request-rate abc", "--request-rate: 'abc' is not a number, or several with commas"),
    ("bench report mine.py", "mine.py: not a result file of tercet bench"),
    ("program --plan nofile.yaml", "--plan nofile.yaml: "),
    ("program --plan text.json", "--plan text.json: "),
    ("program a --program-arg x", "--program-arg: 'x' is not KEY=VALUE"),
    ("program a=1 b", "PROGRAM=WEIGHT: "),
    ("program a=1 --program-arg b:x=1", "--program-arg: b is not in the split"),
    ("program a=1 --by-header nothing", "--by-header: "),
    ("engines move x", "Missing argument 'destination'"),
    ("status --follow", "--follow: needs --moves"),
    ("status --moves --sequences", "--moves: cannot be combined with --sequences"),
    ("moves x y", "No such command 'moves'. Use tercet status --moves, or tercet engines move"),
    ("adapters", "No such command 'adapters'. Use tercet engines adapters"),
    ("profile --engine http://h:1", "No such command 'profile'. Use tercet bench profile"),
    ("engines adapters --unload", "--unload: needs an adapter"),
    ("engines adapters a=/b --replace --unload", "--unload: cannot be combined with --replace"),
    ("bench serve", "--request-rate: is missing"),
    ("bench serve --request-rate -1", "--request-rate"),
    ("bench serve --num-prompts 0", "--num-prompts: "),
    ("bench serve --goodput x", "--goodput: "),
    ("bench serve --extra-body [1]", "--extra-body: "),
    ("bench serve --config nofile.yaml", "--config nofile.yaml: "),
    ("bench report nofile.json", "nofile.json: "),
    ("bench report empty.json", "empty.json: "),
    ("bench serve --request-rate 1 --workload sonnet,input_len=x", "--workload: sonnet.input_len: must be a whole"),
    ("sim --program mine.py:p --program-arg share=x", "--program-arg: mine.py:p: share: must be a number, is 'x'"),
    ("sim --profile nothing", "--profile: 'nothing' does not exist"),
    ("sim --fleet both=0", "--fleet: "),
    ("sim --request-rate x", "--request-rate: "),
    ("sim --program nothing", "--program: there is no 'nothing'"),
    ("sim --option nothing=1", "--option: unknown key nothing"),
    ("sim --reschedule nothing", "--reschedule: there is no policy"),
    ("sim --x ttft.p99", "--x: needs --over"),
    ("sim --over fleet=1P1D --label a", "--label: cannot be combined with --over"),
    ("sim --over fleet=1P1D --request-rate 1,2", "--request-rate: give one rate with --over"),
    ("bench profile -o x.json", "--output: needs --engine"),
    ("bench profile --repeats 5", "--repeats: needs --engine"),
    ("bench profile llama-3.1-8b-h100-tp1 --device x", "--device: needs --engine"),
    ("engine --role decode", "--role: needs --join"),
    ("engine --instances 2", "--instances: needs --join"),
    ("engine --drain-timeout 5", "--drain-timeout: needs --join"),
    ("engine --option a=1", "--option: needs --simulate"),
    ("scale --namespace llm", "--namespace: needs --kubernetes"),
    ("scale decode=2 --selector a=b", "--selector: needs --kubernetes"),
    ("scale --kubeconfig x", "--kubeconfig: needs --kubernetes"),
    ("program --by-path", "--by-path: needs PROGRAM"),
    ("scale --no-wait", "--no-wait: needs ROLE=NUMBER"),
    ("scale --drain-timeout 5", "--drain-timeout: needs ROLE=NUMBER"),
    ("scale --kubernetes --json", "--json: cannot be combined with --kubernetes"),
    ("scale decode=2 --kubernetes --drain-timeout 5", "--drain-timeout: cannot be combined with --kubernetes"),
    ("bench profile --engine http://h:1", "--output: is required"),
    ("sim --over request_rate=x", "--over: "),
    ("bench profile nothing", "NAME: 'nothing' does not exist"),
    ("bench profile --engine nowhere -o x.json", "--engine: 'nowhere' is not a URL"),
    ("bench profile --engine http://h:1 -o x.json --repeats 0", "--repeats: "),
    ("bench profile --engine http://h:1 -o x.json --max-step-tokens 0", "--max-step-tokens: "),
    ("up --config unknown.yaml", "--config unknown.yaml: unknown key prefil; did you mean prefill?"),
    ("up --config kind.yaml", "--config kind.yaml: prefill: "),
    ("up --config list.yaml", "--config list.yaml: "),
    ("up --config syntax.yaml", "--config syntax.yaml: the file is not YAML"),
    ("up --simulate nothing --port 0", "--simulate: 'nothing' does not exist"),
    (f"up {SIMULATED} --option nothing=1", "--option: unknown key nothing"),
    (f"up {SIMULATED} -- --max-num-seqs 1", "vLLM flags after --: "),
    ("up --option a=1", "--option: "),
    ("up --log-format xml", "--log-format: "),
    ("up --openai-layer maybe", "--openai-layer: "),
    ("up --config role.yaml", "--config role.yaml: without-role: "),
    ("up --without-role refuse", "No such option: --without-role; write `without-role: serve` into the file"),
    ("router --model-alias a", "No such option: --model-alias; write `model-aliases: [TEXT]` into the file"),
    ("up --workers 1000", "--workers: "),
    ("up --reschedule nothing --port 0", "--reschedule: there is no policy"),
    ("up --scheduling nofile.yaml --port 0", "--scheduling: nofile.yaml: "),
    ("up --scheduling list.yaml --port 0", "--scheduling: "),
    ("up --program mine.py:nothing --port 0", "--program: mine.py has no function nothing"),
    ("up --program mine.py:no --port 0", "--program: mine.py:no is not an async generator"),
    ("up --program syntax.py:x --port 0", "--program: syntax.py failed to load: SyntaxError"),
    (
        "up --program mine.py:p --program-arg share=lots --port 0",
        "--program-arg: mine.py:p: share: must be a number, is",
    ),
    (
        "up --program mine.py:p --program-arg shar=1 --port 0",
        "--program-arg: mine.py:p has no parameter 'shar'; it takes share",
    ),
    ("up --stream-port 65535 --workers 3", "--stream-port: "),
    ("up --port 8000 --stream-port 7999 --workers 2", "--stream-port: clients use the port 8000"),
    ("router --engine http://h:1 --port 8000 --stream-port 8000", "--stream-port: clients use the port 8000"),
    ("engine --option a=b", "--option: needs --simulate"),
    ("engine --simulate nothing", "--simulate: 'nothing' does not exist"),
    ("engine --simulate llama-3.1-8b-h100-tp1 --print", "--print: "),
    ("router --engine http://h:1,nam=a", "--engine[0]: unknown key nam; did you mean name?"),
    ("router --engine http://h:1 --engine http://h:1/", "--engine: http://h:1 is given twice"),
    ("rescheduler --reschedule decode_load", "No such command 'rescheduler'. Use tercet router --reschedule POLICY"),
    ("chaos --faults nothing", "--faults: 'nothing' is not a kind of fault"),
    ("chaos --schedule nofile", "--schedule: nofile cannot be read"),
    ("demo --max-tokens x", "--max-tokens: must be a whole number, is 'x'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "told"), WRONG, ids=[line for line, _ in WRONG])
def test_what_is_wrong_is_named_in_one_line_and_refused_with_2(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tercet", *shlex.split(line)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tercet: {told}")
    assert said.count("\n") == 1


def test_an_unknown_option_is_one_suggestion_or_a_short_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["up", "--modell", "x"]) == 2
    assert capsys.readouterr().err == "tercet: No such option: --modell; did you mean --model? see tercet up --help\n"
    assert app._run(["up", "--qqqqqqqq"]) == 2
    assert len(re.findall(r" --[a-z-]+", capsys.readouterr().err)) == app.LISTED + 2
    for command in ("status", "up"):
        assert app._run([command, "--qqqqqqqq"]) == 2
        assert len(capsys.readouterr().err) < 400


@pytest.mark.parametrize(
    ("line", "command"),
    [("--nope", "tercet"), ("nothing", "tercet"), ("up --no", "tercet up"), ("bench serve --no", "tercet bench serve")],
)
def test_an_unknown_name_leads_to_the_help_that_has_it(
    line: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app._run(line.split()) == 2
    assert f"see {command} --help" in capsys.readouterr().err
