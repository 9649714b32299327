"""Files that users name: no kind of file makes a reader wait without a bound."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tercet.aio import files
from tercet.aio.files import read_named
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.settings import read_yaml
from tercet.settings.process_settings import KeyFile
from tercet.wire.client import engine_tls
from tercet_checks.chaos.chaos_report import load_schedule
from tercet_gateway.proxied_calls import ServedCertificate
from tercet_lab.bench.results import load_result
from tercet_lab.bench.workloads.recorded import read_text
from tercet_lab.sim.step_times import load_profile

READERS: dict[str, Callable[[Path], object]] = {
    "config": read_yaml,
    "keys": lambda path: KeyFile(str(path), "api-key-file").first(),
    "schedule": load_schedule,
    "result": load_result,
    "workload": lambda path: read_text(str(path), "mooncake"),
    "profile": lambda path: load_profile(str(path)),
    "program": lambda path: load_program(f"{path}:serve"),
    "certificate": lambda path: ServedCertificate(path, path),
    "authority": lambda path: engine_tls(str(path), None, None),
    "pair": lambda path: engine_tls(None, str(path), None),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket", "nothing"])
def test_every_kind_ends_with_one_line(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.01)
    path = tmp_path / "given.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    with pytest.raises(BadRequest) as refused:
        READERS[name](path)
    assert "\n" not in refused.value.message
    assert "None" not in refused.value.message


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    said = b"port: 8001\n" * 20_000
    writing = threading.Thread(target=path.write_bytes, args=(said,))
    writing.start()
    assert read_named(path) == said
    writing.join()
    (tmp_path / "long").write_bytes(b"long")
    with pytest.raises(OSError, match="has more than 3 bytes"):
        read_named(tmp_path / "long", 3)
