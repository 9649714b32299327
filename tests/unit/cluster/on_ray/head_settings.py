"""Ray's variables for a head that may be down for a while, read from the page that tells users to set them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[4] / "docs/howto/ray.md"


def head_settings(storage: str) -> Mapping[str, str]:
    """The variables of the page; ``storage`` is a directory that outlives the head's processes."""
    lines = re.findall(r"^export .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    found = dict(pair for line in lines for pair in re.findall(r"(RAY_\w+)=(\S+)", line))
    assert {"RAY_gcs_storage", "RAY_gcs_rpc_server_reconnect_timeout_s"} <= found.keys()
    return {**found, "RAY_gcs_storage_path": storage}
