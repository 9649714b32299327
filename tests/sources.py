"""The Python files of the product and of the packages beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ROOT / "src" / "tercet"
PACKAGES = {
    found.name: found for found in sorted(ROOT.glob("packages/*/src/tercet_*")) if (found / "__init__.py").is_file()
}
"""The folder of each package beside the product, by its import name."""
INSIDE = {f"tercet.{found.name}": found for found in sorted(ROOT.glob("packages/*/src/tercet/*")) if found.is_dir()}
"""The folder of what a package adds to the product's names, such as `tercet.lab`, by its import name."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every file with its name: within the product, or after the name of its package."""
    for name, top in {"": PRODUCT, **PACKAGES, **INSIDE}.items():
        for path in sorted(top.rglob("*.py")):
            yield f"{name}/{path.relative_to(top).as_posix()}".lstrip("/"), path
