"""Errors for invalid vLLM flags: one sentence, without the hundreds of lines of usage that vLLM prints before it."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from tercet.protocol import BadRequest
from tercet.settings.declaration import near

AFTER_DASHES = "flags for vLLM"


def refuse_in_a_sentence() -> None:
    """Make vLLM's parsers raise :class:`~tercet.protocol.BadRequest` instead of printing their usage and exiting.

    Relies on ``FlexibleArgumentParser.error`` being called by argparse with a message, and looked up on the class.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    FlexibleArgumentParser.error = _refuse  # type: ignore[method-assign]


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise BadRequest(f"{AFTER_DASHES}: {message}{_meant(parser, message)}", AFTER_DASHES)


def _meant(parser: argparse.ArgumentParser, message: str) -> str:
    unknown = re.match(r"unrecognized arguments: (--?[\w-]+)", message)
    if unknown is None:
        return ""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    hint = near(unknown[1], flags)
    return f"; {hint}" if hint.startswith("did you mean") else "; `vllm serve --help=all` lists them"
