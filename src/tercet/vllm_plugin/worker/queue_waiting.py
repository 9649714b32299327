"""Waiting between vLLM's processes on a CPU: they sleep instead of polling.

An engine core and its workers exchange messages through shared memory. A waiting process polls for a second, yielding
its core in between, and only then sleeps until it is notified. With an accelerator, polling only occupies a core. If
engines compute on those cores, polling slows down the steps of this engine and others, and the processes that send
tokens to clients. With sleeping, a step begins a fraction of a millisecond later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from tercet.protocol import BadRequest
from tercet.settings.process_settings import SPIN_SECONDS_VARIABLE
from tercet.vllm_plugin.start.patching import Method, wrap

NAP_MS = 2
NAPS_AFTER_READ = 1.0  # vLLM's own limit between polling and sleeping


def spin_seconds(environment: Mapping[str, str], on_cpu: bool) -> float | None:
    """Return the seconds to poll before sleeping; ``None`` leaves the time to vLLM.

    0 on a CPU, unless ``TERCET_SPIN_SECONDS`` sets it. Raises :class:`~tercet.protocol.BadRequest`.
    """
    given = environment.get(SPIN_SECONDS_VARIABLE)
    if given is None:
        return 0.0 if on_cpu else None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(
            f"{SPIN_SECONDS_VARIABLE}={given}: must be a number of seconds, 0 or more", SPIN_SECONDS_VARIABLE
        )
    return seconds


def let_queue_readers_sleep() -> None:
    """Make readers of vLLM's message queues sleep as soon as there is nothing to read.

    vLLM's reader polls for ``busy_loop_s`` seconds and then waits on a socket that writers notify with every message.
    The socket drops a notice while it still carries an earlier one, so right after a read no sleep is longer than
    ``NAP_MS`` milliseconds; the caller checks again after each return.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    seconds = spin_seconds(os.environ, current_platform.is_cpu())
    if seconds is None:
        return

    def nap_or_sleep(wait: Method, self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = seconds  # only readers wait
        if time.monotonic() <= self.last_read + NAPS_AFTER_READ:
            timeout_ms = NAP_MS if timeout_ms is None else min(NAP_MS, timeout_ms)
        wait(self, timeout_ms)

    wrap(SpinCondition, "wait", nap_or_sleep)
