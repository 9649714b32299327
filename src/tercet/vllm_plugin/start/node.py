"""The ranks of an engine on one of its further machines, which have no API server.

The command is ``python -m tercet.vllm_plugin.start.node FLAGS``, with vLLM's flags, including ``--headless``.
"""

from __future__ import annotations

from typing import Any


def main() -> None:
    """Compute for the engine's first machine until that machine, or a signal, ends this process."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tercet.vllm_plugin.differences import cli_args
    from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence, refusing_in_a_sentence, without_noise

    without_noise()
    refuse_in_a_sentence()
    options: Any = cli_args()
    parser = options.make_arg_parser(FlexibleArgumentParser(description="An engine's ranks on a further machine."))
    with refusing_in_a_sentence():
        args = parser.parse_args()
        options.validate_parsed_serve_args(args)
        args.api_server_count = 0
        run_headless(args)


if __name__ == "__main__":
    main()
