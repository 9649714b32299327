"""What vLLM says of flags that it does not take: a sentence, instead of hundreds of lines of usage before it."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from tercet.protocol import BadRequest
from tercet.settings.declaration import near

AFTER_DASHES = "flags for vLLM"


def refuse_in_a_sentence() -> None:
    """From here on vLLM's parsers raise :class:`~tercet.protocol.BadRequest`; before, they print their usage and exit.

    Relies on ``FlexibleArgumentParser.error`` being what argparse calls with a message, and looked up on the class.
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
