"""The conformance suite against pickers that are not ours: one that does well, and one for each way to do badly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest

from tests.long_runs import FULL
from tests.unit.wire.client.certificates import Authority

from .faults import FAULTS, WIDE_FAULTS
from .forked_runs import INSTALLED, Runs, forked_runs
from .plain_picker import serving_plainly

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SUITE = Path(__file__).resolve().parents[2] / "conformance"
SOME_CASES = Path(__file__).resolve().with_name("some_cases.py")
# In full, each fault meets the whole suite; otherwise the cases that it must fail and a tenth of the others.
ENDPOINTS = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
WITHOUT_THEIR_PICKERS = {
    "test_without_a_ready_endpoint_the_answer_is_503",
    "test_what_may_be_dropped_gets_429_while_the_pool_is_full",
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which the suite is a package, and nothing else of this repository is but a plugin that selects."""
    (tmp_path / "picker_suite").symlink_to(SUITE)
    (tmp_path / SOME_CASES.name).symlink_to(SOME_CASES)
    return tmp_path


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with forked_runs() as forking:
        yield forking


async def run_by_itself(where: Path, *options: str) -> tuple[int, str]:
    """Run the suite in an interpreter that has imported nothing yet; returns its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INSTALLED, *options, cwd=where,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def outcomes(where: Path, runs: Runs | None, *options: str) -> tuple[dict[str, list[str]], str]:
    """What became of each test's cases, by its function's name: passed, failure, error, skipped; and what is said.

    Without ``runs`` the suite runs in an interpreter of its own.
    """
    report = where / "report.xml"
    given = ("-q", f"--junitxml={report}", *options)
    code, said = await (asyncio.to_thread(runs.run, where, given) if runs else run_by_itself(where, *given))
    assert code in (0, 1), said
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        found.setdefault(case.attrib["name"].partition("[")[0], []).append(kinds[0] if kinds else "passed")
    return found, said


@asynccontextmanager
async def pickers(fault: str = "") -> AsyncGenerator[Sequence[str]]:
    """One with endpoints, one without, and one whose endpoints are full, as options of the suite."""
    async with (
        serving_plainly(ENDPOINTS, fault) as port,
        serving_plainly((), fault) as empty,
        serving_plainly(ENDPOINTS, fault, full=True) as full,
    ):
        more = f"--empty=127.0.0.1:{empty}", f"--saturated=127.0.0.1:{full}", "--sheddable=batch"
        yield target(port, *more)


def target(port: int, *options: str) -> Sequence[str]:
    # An answer takes long on a busy machine. Tests of wrong pickers, for which the suite waits in vain, replace this.
    return f"--target=127.0.0.1:{port}", f"--endpoints={','.join(ENDPOINTS)}", "--patience=120", *options


async def test_a_picker_that_keeps_the_protocol_passes(installed: Path) -> None:
    async with pickers() as options:
        found, said = await outcomes(installed, None, *options)
    assert {kind for kinds in found.values() for kind in kinds} == {"passed"}, said
    assert sum(len(kinds) for kinds in found.values()) > 200


@pytest.mark.parametrize(("fault", "cases"), FAULTS.items(), ids=list(FAULTS))
async def test_what_is_done_wrong_fails_the_cases_that_are_about_it(
    installed: Path, runs: Runs, fault: str, cases: set[str]
) -> None:
    # The seed gives each fault another tenth, so that all of them together meet nearly every case.
    some = () if FULL else ("-p", SOME_CASES.stem, f"--all-of={','.join(sorted(cases))}", f"--seed={fault}")
    async with pickers(fault) as options:
        found, said = await outcomes(installed, runs, *options, "--patience=5", *some)
    assert found.keys() > cases, "no other case has run"
    assert {name for name, kinds in found.items() if "failure" in kinds} == cases, said
    assert not [name for name, kinds in found.items() if "error" in kinds], said


@pytest.mark.parametrize(("fault", "cases"), WIDE_FAULTS.items(), ids=list(WIDE_FAULTS))
async def test_what_is_done_wrong_with_every_request_fails(
    installed: Path, runs: Runs, fault: str, cases: set[str]
) -> None:
    async with pickers(fault) as options:
        found, said = await outcomes(installed, runs, *options, "--patience=5", "-k", " or ".join(cases))
    assert {name for name, kinds in found.items() if "failure" in kinds} >= cases, said


async def test_a_picker_that_speaks_tls_and_serves_its_health_elsewhere(installed: Path, runs: Runs) -> None:
    certificate, key = Authority(installed, "nobody-knows-it").issue("picker")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    async with (
        serving_plainly(ENDPOINTS, "does not say whether it is ready", credentials=credentials) as port,
        serving_plainly(ENDPOINTS) as health,
    ):
        # What is skipped, and a tenth of the others, each of which needs the channel.
        some = () if FULL else ("-p", SOME_CASES.stem, f"--all-of={','.join(WITHOUT_THEIR_PICKERS)}")
        options = target(port, "--tls", f"--health=127.0.0.1:{health}")
        found, said = await outcomes(installed, runs, *options, *some)
    skipped = {name for name, kinds in found.items() if set(kinds) == {"skipped"}}
    assert skipped == WITHOUT_THEIR_PICKERS
    assert {kind for kinds in found.values() for kind in kinds} == {"passed", "skipped"}, said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "--target: name the endpoint picker"),
        (("--target=127.0.0.1:1",), "--endpoints: name all endpoints"),
        (("--target=127.0.0.1:1", "--endpoints=10.0.0.1:8000"), "--endpoints: name all endpoints"),
        (target(1, "--saturated=127.0.0.1:2"), "--sheddable: name the objective"),
    ],
)
async def test_what_is_lacking_is_named(installed: Path, runs: Runs, options: Sequence[str], complaint: str) -> None:
    code, said = await asyncio.to_thread(runs.run, installed, options)
    assert (code, complaint in said) == (pytest.ExitCode.USAGE_ERROR, True), said
