"""What a wrong command line is told: one line that names what is wrong with it, or whose help has the answer."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
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


# What is wrong by itself is reported before a port that is taken: a free port would not mend it.

UP = "up --model {model} --port {taken}"
ROUTER = "router --engine http://127.0.0.1:1 --model {model} --port {taken}"
ENGINE = "engine --model {model} --port {taken}"
EPP = "epp --engine http://127.0.0.1:1 --port {taken} --metrics-port 0"
SIDECAR = "sidecar --engine http://127.0.0.1:1 --port {taken}"
PROFILE = "--simulate llama-3.1-8b-h100-tp1"
# A command at a port that is taken, what is wrong with it, and what its complaint names.
WRONG_BY_ITSELF = [
    (UP, "--model ./not/here", "model"),
    (UP, "--model {empty}", "model"),
    (UP, "--program nothing", "program"),
    (UP, "--reschedule nothing", "--reschedule"),
    (UP, "--scheduling ./not/here.yaml", "--scheduling"),
    (UP, "--log-dir {model}/config.json/logs", "--log-dir"),
    (UP, "--detach --model ./not/here", "model"),
    (UP, "--detach --program nothing", "program"),
    (UP, "--detach --reschedule nothing", "--reschedule"),
    (UP, "--detach --log-dir {model}/config.json/logs", "--log-dir"),
    (UP, f"{PROFILE} --model ./not/here", "model"),
    (UP, "--simulate nothing", "--simulate"),
    (UP, f"{PROFILE} --option nothing=1", "--option"),
    (UP, "-- --tensor-parallel-size none", "--tensor-parallel-size"),
    (UP, "-- --gpu-memory-utilization 7", "--gpu-memory-utilization"),
    (UP, "-- --kv-transfer-config no", "--kv-transfer-config"),
    (ROUTER, "--model ./not/here", "model"),
    (ROUTER, "--model {empty}", "model"),
    (ROUTER, "--program nothing", "program"),
    (ROUTER, "--reschedule nothing", "--reschedule"),
    (ROUTER, "--scheduling ./not/here.yaml", "--scheduling"),
    (ROUTER, "--engine-ca ./not/here.pem", "--engine-ca"),
    (ENGINE, "--model ./not/here", "model"),
    (ENGINE, "--model {empty}", "model"),
    (ENGINE, "--prefill-hosts nowhere", "--prefill-hosts"),
    (ENGINE, "-- --tensor-parallel-size none", "--tensor-parallel-size"),
    (ENGINE, "-- --kv-transfer-config no", "--kv-transfer-config"),
    (ENGINE, f"{PROFILE} --model ./not/here", "model"),
    (ENGINE, f"{PROFILE} --option nothing=1", "--option"),
    (ENGINE, "--simulate nothing", "--simulate"),
    (EPP, "--scheduling ./not/here.yaml", "--scheduling"),
    (EPP, "--render-model ./not/here", "model"),
    (EPP, "--render-model {empty}", "--render-model"),
    (EPP, "--engine-ca ./not/here.pem", "--engine-ca"),
    (EPP, "--tls-cert ./not/here.pem --tls-key ./not/here.pem", "--tls-cert"),
    (SIDECAR, "--prefill-hosts nowhere", "--prefill-hosts"),
    (SIDECAR, "--engine-ca ./not/here.pem", "--engine-ca"),
    (SIDECAR, "--tls-cert ./not/here.pem --tls-key ./not/here.pem", "--tls-cert"),
]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A model as far as commands look at it, and a directory that is none."""
    model, empty = tmp_path / "model", tmp_path / "empty"
    for place in (model, empty):
        place.mkdir()
    (model / "config.json").write_text("{}")
    return {"model": model, "empty": empty}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "wrong", "names"), WRONG_BY_ITSELF, ids=[f"{c.split()[0]} {w}" for c, w, _ in WRONG_BY_ITSELF]
)
def test_a_wrong_setting_comes_before_a_port_that_is_taken(
    command: str, wrong: str, names: str, taken: int, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app._run(f"{command} {wrong}".format(taken=taken, **places).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tercet: {names}") or said.startswith(f"tercet: --{names}"), said
    assert said.count("\n") == 1, said


@pytest.mark.parametrize("command", [UP, f"{UP} --detach", f"{UP} {PROFILE}", ROUTER, ENGINE, f"{ENGINE} {PROFILE}"])
def test_a_port_that_is_taken_comes_before_memory_that_is_short(
    command: str, taken: int, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    short = "" if command == ROUTER else " --kv-cache-gib 1000000"
    assert app._run(f"{command}{short}".format(taken=taken, **places).split()) == 2
    assert capsys.readouterr().err.startswith(f"tercet: --port: cannot listen at 127.0.0.1:{taken}: ")


@pytest.mark.parametrize(
    "wrong",
    [
        "--port {taken}",
        "--prefill-hosts nowhere",
        "--host 0.0.0.0",
        "-- --api-server-count 2",
        "-- --tensor-parallel-size no",
        "--join http://127.0.0.1:1 --port {taken}",
        "--join http://127.0.0.1:1 --host 0.0.0.0",
    ],
)
def test_an_engine_that_cannot_start_converts_no_model(
    wrong: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TERCET_SECRET", raising=False)
    assert app._run(f"engine {wrong}".format(taken=taken).split()) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("flag", ["--port", "--metrics-port", "--grpc-health-port"])
def test_each_port_of_an_endpoint_picker_is_named_by_its_own_flag(
    flag: str, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = {"--port": 0, "--metrics-port": 0, flag: taken}
    flags = [str(word) for given in ports.items() for word in given]
    assert app._run(["epp", "--engine", "http://127.0.0.1:1", "--host", "127.0.0.1", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"tercet: {flag}: cannot listen at 127.0.0.1:{taken}: ")


def test_a_port_that_a_sidecar_cannot_have_is_named(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["sidecar", "--engine", "http://127.0.0.1:1", "--host", "127.0.0.1", "--port", str(taken)]) == 2
    assert capsys.readouterr().err.startswith(f"tercet: --port: cannot listen at 127.0.0.1:{taken}: ")
