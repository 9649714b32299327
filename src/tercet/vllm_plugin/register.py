"""The general plugin: vLLM calls :func:`register` in every process that it starts, before any engine is built."""

from __future__ import annotations

import logging


def register() -> None:
    """Install Tercet's hooks; they do nothing unless the engine runs with ``TercetConnector``.

    With an unsupported vLLM, only log a warning, so that plain serving still works; the connector then refuses to
    start.
    """
    import vllm.envs

    from tercet.settings.verb_log import log_as_the_environment_says
    from tercet.vllm_plugin.hooks import UnsupportedVLLM, require_hooks
    from tercet.vllm_plugin.start.leak_reports import without_leak_reports
    from tercet.vllm_plugin.start.log_noise import bound_lines, without_noise
    from tercet.vllm_plugin.start.refusals import refusing_in_a_sentence

    without_leak_reports()
    without_noise()
    bound_lines()
    with refusing_in_a_sentence():
        log_as_the_environment_says(vllm.envs.VLLM_LOGGING_LEVEL)
    try:
        require_hooks("engine")
    except UnsupportedVLLM as error:
        logging.getLogger(__name__).warning("Tercet is installed but inactive: %s", error)
        return

    from tercet.vllm_plugin.core.core_methods import add_core_methods
    from tercet.vllm_plugin.core.grammar_time import bound_grammar_time
    from tercet.vllm_plugin.core.replay_requests import bound_replay_requests
    from tercet.vllm_plugin.start.loading_stages import tell_stages_of_workers
    from tercet.vllm_plugin.start.start_checks import check_before_loading
    from tercet.vllm_plugin.worker.model_runner import begin_requests_with_output, keep_generators_of_unfinished_prompts
    from tercet.vllm_plugin.worker.queue_waiting import let_queue_readers_sleep

    check_before_loading()
    add_core_methods()
    begin_requests_with_output()
    keep_generators_of_unfinished_prompts()
    let_queue_readers_sleep()
    bound_replay_requests()
    bound_grammar_time()
    tell_stages_of_workers()
