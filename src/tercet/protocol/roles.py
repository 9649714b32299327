"""What an engine is for, in a fleet: known to the router only, since every engine can do both."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode", "both"]
