"""The general plugin: vLLM calls :func:`register` in every process that it starts, before any engine is built."""

from __future__ import annotations

import logging


def register() -> None:
    """Install Tercet's hooks; they do nothing unless the engine runs with ``TercetConnector``.

    With a vLLM that Tercet was not built against it only warns, so that plain serving keeps working there; the
    connector then refuses to start.
    """
    from tercet.vllm_plugin.compat import UnsupportedVLLM, require_supported

    try:
        require_supported()
    except UnsupportedVLLM as error:
        logging.getLogger(__name__).warning("Tercet is installed but inactive: %s", error)
        return

    from tercet.vllm_plugin.core import install_core_methods
    from tercet.vllm_plugin.resume import install_worker_hook
    from tercet.vllm_plugin.seeded import install_seeded_prompt_hook
    from tercet.vllm_plugin.waiting import install_waiting_hook

    install_core_methods()
    install_worker_hook()
    install_seeded_prompt_hook()
    install_waiting_hook()
