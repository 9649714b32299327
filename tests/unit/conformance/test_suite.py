"""The conformance suite against pickers that are not ours: one that does well, and one for each way to do badly."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from .faults import EXPECTED, Fault
from .plain_picker import FAULTS, serving_plainly

ROOT = Path(__file__).resolve().parents[3]
ENDPOINTS = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


async def failed(directory: Path, port: int, *options: str) -> set[str]:
    """The tests of the suite that fail, by their functions' names."""
    report = directory / "report.xml"
    target = "--target", f"127.0.0.1:{port}", "--endpoints", ",".join(ENDPOINTS), "--patience", "2"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.conformance.run", "-q", f"--junitxml={report}", *target, *options,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode in (0, 1), said.decode()
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    assert len(cases) > 200
    bad = {each.attrib["name"].partition("[")[0] for each in cases if each.find("failure") is not None}
    assert not [each for each in cases if each.find("error") is not None], said.decode()
    assert bool(bad) == (process.returncode == 1)
    return bad


async def test_print(tmp_path: Path) -> None:
    import time

    for fault in ("", *FAULTS):
        t = time.time()
        async with (
            serving_plainly(ENDPOINTS, fault) as port,
            serving_plainly((), fault) as empty,
            serving_plainly(ENDPOINTS, fault, full=True) as full,
        ):
            print(
                repr(fault),
                sorted(
                    await failed(
                        tmp_path, port, f"--empty=127.0.0.1:{empty}", f"--saturated=127.0.0.1:{full}", "--sheddable=any"
                    )
                ),
                round(time.time() - t, 1),
                flush=True,
            )
