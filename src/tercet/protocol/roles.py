"""The roles of engines in a fleet. Only the router knows them: every engine can prefill and decode."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode", "both"]
