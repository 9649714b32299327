"""The general plugin: vLLM calls :func:`register` in every process that it starts, before any engine is built."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time

LOOK_SECONDS = 0.5
"""Seconds between two looks of an engine's process at the process that started it."""
CLEAN_UP_SECONDS = 3.0
_watch: threading.Thread | None = None


def register() -> None:
    """Install Tercet's hooks; they do nothing unless the engine runs with ``TercetConnector``.

    With an unsupported vLLM, only log a warning, so that plain serving still works; the connector then refuses to
    start.
    """
    import vllm.envs

    from tercet.logs import log_as_the_environment_says
    from tercet.vllm_plugin.hooks import UnsupportedVLLM, require_hooks
    from tercet.vllm_plugin.start.process_output import (
        bound_lines,
        refusing_in_a_sentence,
        without_leak_reports,
        without_noise,
    )

    without_leak_reports()
    without_noise()
    bound_lines()
    with refusing_in_a_sentence():
        log_as_the_environment_says(vllm.envs.VLLM_LOGGING_LEVEL)
    # vLLM calls this before any engine is built, so its classes are patched before it makes objects of them.
    try:
        require_hooks("engine")
    except UnsupportedVLLM as error:
        logging.getLogger(__name__).warning("Tercet is installed but inactive: %s", error)
        return

    from tercet.vllm_plugin.core.core_methods import add_core_methods, bound_replay_requests
    from tercet.vllm_plugin.core.grammar_time import bound_grammar_time
    from tercet.vllm_plugin.start.start_checks import check_before_loading
    from tercet.vllm_plugin.worker.model_runner import (
        begin_requests_with_output,
        keep_generators_of_unfinished_prompts,
        let_queue_readers_sleep,
    )

    check_before_loading()
    add_core_methods()
    begin_requests_with_output()
    keep_generators_of_unfinished_prompts()
    let_queue_readers_sleep()
    bound_replay_requests()
    bound_grammar_time()
    end_with_parent()


def end_with_parent() -> None:
    """Make an engine's core or worker end when the process that started it has been killed.

    vLLM's API server ends its core when it stops, and the core its workers, but not when they are killed: the core,
    its workers and their agents would keep memory and devices until they are killed, too. The opposite direction is
    vLLM's: a core whose worker has ended ends, and so does the API server of such a core.
    """
    global _watch
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or _watch is not None:
        return
    _watch = threading.Thread(target=_end_with, args=(parent.pid,), name="tercet-parent", daemon=True)
    _watch.start()


def _end_with(parent: int) -> None:
    # The parent's id, and not the signal that the kernel can send: that one comes already when the thread has ended
    # that started this process.
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    name = multiprocessing.current_process().name
    logging.getLogger(__name__).critical(
        "the process %d, which started %s, was lost; %s (process %d) ends with it", parent, name, name, os.getpid()
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(CLEAN_UP_SECONDS)
    os._exit(1)
