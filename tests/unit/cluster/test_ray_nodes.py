"""What `tercet doctor` says of Ray on this machine: whether engines outlive a head that is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet_ray.ray_access import HEAD_AWAY_SECONDS
from tercet_ray.ray_nodes import RayProcess, ray_findings, ray_processes

from .on_ray.head_settings import head_settings

AS_TOLD = [RayProcess("raylet", HEAD_AWAY_SECONDS, "rocksdb"), RayProcess("gcs_server", HEAD_AWAY_SECONDS, "rocksdb")]


@pytest.mark.parametrize(
    ("found", "states"),
    [
        ([], {}),
        (AS_TOLD, {"Ray node": "ok", "Ray head": "ok"}),
        ([RayProcess("raylet", 60, "memory")], {"Ray node": "costs"}),
        ([*AS_TOLD, RayProcess("raylet", 60, "rocksdb")], {"Ray node": "costs", "Ray head": "ok"}),
        ([AS_TOLD[0], RayProcess("gcs_server", 600, "memory")], {"Ray node": "ok", "Ray head": "costs"}),
    ],
)
def test_what_it_costs(found: list[RayProcess], states: dict[str, str]) -> None:
    findings = list(ray_findings(found))
    assert {each.part: each.state for each in findings} == states
    assert all(bool(each.do) == (each.state == "costs") for each in findings)


def process(root: Path, pid: int, name: str, **variables: str) -> None:
    directory = root / str(pid)
    directory.mkdir()
    (directory / "comm").write_text(f"{name}\n")
    told = "\0".join(f"{key}={value}" for key, value in {"PATH": "/bin", **variables}.items())
    (directory / "environ").write_text(told + "\0")


def test_rays_processes_are_read_with_their_variables(tmp_path: Path) -> None:
    process(tmp_path, 1, "gcs_server", **head_settings("/var/lib/ray"))
    process(tmp_path, 2, "raylet")
    process(tmp_path, 3, "python", RAY_gcs_storage="no matter")
    (tmp_path / "4").mkdir()  # it has just ended
    (tmp_path / "self").mkdir()
    assert ray_processes(tmp_path) == (
        RayProcess("gcs_server", HEAD_AWAY_SECONDS, "rocksdb"), RayProcess("raylet", 60, "memory"),
    )  # fmt: skip
