"""The ranks of an engine on one of its further machines, which have no API server.

The command is ``python -m tercet.vllm_plugin.start.node FLAGS``, with vLLM's flags, ``--headless`` among them.
"""

from __future__ import annotations

import sys
from typing import Any

from tercet.protocol import BadRequest


def main() -> None:
    """Compute for the engine's first machine until it, or a signal, ends this."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tercet.vllm_plugin.start.flag_errors import refuse_in_a_sentence
    from tercet.vllm_plugin.start.log_noise import without_noise

    without_noise()
    refuse_in_a_sentence()
    parser: Any = make_arg_parser(FlexibleArgumentParser(description="An engine's ranks on a further machine."))
    try:
        args = parser.parse_args()
        validate_parsed_serve_args(args)
        args.api_server_count = 0
        run_headless(args)
    except BadRequest as error:
        print(f"tercet: {error.message}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
