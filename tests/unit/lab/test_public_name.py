"""`import tercet.lab`: the laboratory under the product's name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")


def test_a_script_needs_one_import() -> None:
    simulation = lab.Experiment(
        program="data_parallel",
        fleet=lab.Fleet("both=2", profile="llama-3.1-8b-h100-tp1"),
        work=lab.SyntheticWorkload(rate=4.0, requests=20),
    )
    assert simulation.point(4.0).summary.completed == 20


def test_the_product_does_not_load_it() -> None:
    loaded = "import sys, tercet.cli; print(any(name.startswith(('tercet.lab', 'tercet_lab')) for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
