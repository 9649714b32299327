"""`tercet up --simulate` starts, and answers, where neither vLLM nor torch can be imported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.longest_wait import LONGEST_WAIT_S

pytestmark = pytest.mark.processes
BARRED = "import sys\nfor name in ('torch', 'vllm', 'transformers', 'gguf'):\n    sys.modules[name] = None\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_simulated_fleet_needs_a_tokenizer_alone(tmp_path: Path, workers: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARRED)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": paths, "TERCET_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tercet.cli", "up", "--simulate", "llama-3.1-8b-h100-tp1", "--port", "0"]
    command += ["--workers", str(workers)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = list[str]()
            for line in process.stdout:
                said.append(line)
                if line.startswith("Ctrl-C"):
                    break
            ready = re.search(r"ready at (\S+),", "".join(said))
            assert ready is not None, "".join(said)
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            request = urllib.request.Request(
                f"{ready[1]}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=LONGEST_WAIT_S) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT or process.returncode == 0
    assert not list(tmp_path.rglob("*.safetensors"))
