"""Which trials of a sweep are best, and which are so by chance only; and the picture of that."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.grid import Estimate, standings_of
from tercet_lab.bench.simulated.sweep import SweepReport, Trial
from tercet_lab.plot import plot_sweep

from .golden_images import check_image

pytestmark = pytest.mark.slow


def test_with_one_seed_the_best_are_the_frontier() -> None:
    trials = [([1.0], [5.0]), ([2.0], [3.0]), ([3.0], [4.0]), ([1.0], [6.0]), ([math.inf], [1.0])]
    # The four that finished are compared in pairs and in both metrics.
    assert standings_of(trials) == (["best", "best", "beaten", "beaten", "beaten"], 12)


@pytest.mark.parametrize("count", [2, 4, 10, 20])
def test_equal_settings_are_rarely_beaten(count: int) -> None:
    chance, sweeps, wrong = random.Random(count), 100, 0
    for _ in range(sweeps):
        seeds = [chance.gauss(1, 0.3) for _ in range(5)]
        trials = [
            ([each + chance.gauss(0, 0.1) for each in seeds], [chance.gauss(1, 0.1) for _ in seeds])
            for _ in range(count)
        ]
        wrong += "beaten" in standings_of(trials)[0]
    assert wrong / sweeps < 0.07


def test_a_setting_that_is_much_worse_is_beaten_among_twenty() -> None:
    chance = random.Random(0)
    equal = [[chance.gauss(1, 0.01) for _ in range(5)] for _ in range(20)]
    trials = [(each, each) for each in equal] + [([2 * each for each in equal[0]], equal[1])]
    assert standings_of(trials)[0][-1] == "beaten"


def test_trials_of_another_load_do_not_compete() -> None:
    light, heavy = ([1.0, 1.1, 1.2], [5.0, 5.1, 5.2]), ([9.0, 9.1, 9.2], [50.0, 50.1, 50.2])
    assert standings_of([light, heavy], ["2", "4"]) == (["best", "best"], 0)
    assert standings_of([light, heavy], ["2", "2"]) == (["best", "beaten"], 2)


def test_what_seeds_differ_in_more_than_trials_is_chance() -> None:
    plain = ([1.0, 2.0, 3.0], [5.0, 5.1, 5.2])
    # A little worse in both for every seed, although seeds differ in far more.
    worse = ([1.01, 2.01, 3.01], [5.01, 5.11, 5.21])
    # Worse in the mean, better for one seed.
    unlucky = ([1.5, 1.0, 4.5], [5.0, 5.1, 5.2])
    assert standings_of([plain, worse])[0] == ["best", "beaten"]
    assert standings_of([plain, unlucky])[0] == ["best", "near"]
    # On the frontier for a difference that is chance, and clearly worse otherwise.
    lucky = ([2.0, 3.0, 4.0], [4.9, 5.2, 5.19])
    assert standings_of([plain, lucky])[0] == ["best", "near"]


def test_an_interval_is_students() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.302653 / math.sqrt(3))
    assert (Estimate.of([2.0]), Estimate.of([2.0, math.inf]).half) == (Estimate(2.0, None), None)


def trial(ratio: str, tokens: str, x: float, y: float, standing: str, half: float | None = 0.0015) -> Trial:
    return Trial(
        settings={"balance_ratio": ratio, "max_num_batched_tokens": tokens}, points=(), x=Estimate(x, half),
        y=Estimate(y, None if half is None else half / 15), standing=standing,  # type: ignore[arg-type]
    )  # fmt: skip


TRIALS = (
    trial("0", "512", 0.067, 0.0073, "best"), trial("0", "2048", 0.060, 0.0073, "near"),
    trial("0.1", "512", 0.0616, 0.0074, "beaten"), trial("0.1", "2048", 0.055, 0.0074, "best"),
    trial("0.2", "512", 0.0579, 0.0076, "beaten"), trial("0.2", "2048", 0.051, 0.0076, "best"),
    trial("0.3", "512", 0.057, 0.00778, "beaten"), trial("0.3", "2048", 0.0486, 0.0078, "best"),
    trial("0.5", "512", 0.0573, 0.0081, "beaten"), trial("0.5", "2048", 0.0476, 0.0084, "near"),
)  # fmt: skip


def report(*trials: Trial, seeds: int = 5) -> SweepReport:
    arguments = {
        "program": "balanced", "fleet": "1P1D", "profile": "llama", "rate": 10.0, "workload": {"requests": 300},
        "over": {"balance_ratio": [], "max_num_batched_tokens": []},
    }  # fmt: skip
    return SweepReport(
        version="0.1.0",
        arguments=arguments,
        seeds=tuple(range(seeds)),
        x="ttft.mean",
        y="tpot.mean",
        trials=trials,
        comparisons=90,
    )


@pytest.mark.slow
def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_image("sweep.png", lambda file: plot_sweep(report(*TRIALS), file), tmp_path, monkeypatch)


@pytest.mark.slow
def test_trials_that_failed_are_not_drawn_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "sweep.svg"
    plot_sweep(report(trial("0", "512", 1.5, 0.01, "best", None), trial("1", "512", math.inf, 1, "beaten")), file)
    text = file.read_text(encoding="utf-8")
    assert "1 settings are not drawn: some of their requests failed." in text
    assert "mean TTFT, s" in text


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"--plot: .* cannot be written"):
        plot_sweep(report(*TRIALS), tmp_path / "none" / "x.png")
