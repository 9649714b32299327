"""The ranks of an engine on one of its further machines, which have no API server.

The command is ``python -m tercet.vllm_plugin.start.node FLAGS``, with vLLM's flags, including ``--headless``.
"""

from __future__ import annotations

from tercet.vllm_plugin.start.flags import read_flags


def main() -> None:
    """Compute for the engine's first machine until that machine, or a signal, ends this process."""
    from vllm.entrypoints.cli.serve import run_headless

    from tercet.vllm_plugin.start.process_output import refusing_in_a_sentence

    args = read_flags("An engine's ranks on a further machine.")
    args.api_server_count = 0
    with refusing_in_a_sentence():
        run_headless(args)


if __name__ == "__main__":
    main()
