"""Events of a fleet and of its requests, in one vocabulary: each event is one log line, with its reason.

A line has the event's name, then a sentence; ``--log-format json`` adds the event's fields. The common fields are
``engine``, ``program``, ``seq_id``, ``code`` (of the error that caused the event) and ``reason`` (a sentence). Events
that change the fleet have the level WARNING or ERROR; most events of one request have the level INFO.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tercet.settings.log_lines import EVENTS, FIELDS

logger = logging.getLogger(EVENTS)
# Without another handler, as in simulations, events are dropped and do not go to standard error.
logger.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class LogEvent:
    """A kind of event; ``words`` is the format string of its sentence, with the event's fields."""

    name: str
    level: int
    words: str

    def tell(self, cause: BaseException | None = None, /, **fields: object) -> None:
        """Log one event of this kind; ``cause`` is an exception whose traceback is logged too."""
        if logger.isEnabledFor(self.level):
            said = {FIELDS: {"event": self.name, **fields}}
            logger.log(self.level, "%s: %s", self.name, self.words.format_map(fields), extra=said, exc_info=cause)


INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR

# ---- engines ---------------------------------------------------------------------------------------------------

ENGINE_ADDED = LogEvent("engine_added", WARNING, "{engine} ({url}) has the role {role}: {reason}")
ENGINE_REMOVED = LogEvent("engine_removed", WARNING, "{engine} gets no new requests, running ones continue: {reason}")
ENGINE_ROLE = LogEvent("engine_role", WARNING, "{engine} changes its role from {before} to {role}: {reason}")
ENGINE_DRAINED = LogEvent("engine_drained", WARNING, "{engine} is drained and not picked: {reason}")
ENGINE_UNDRAINED = LogEvent("engine_undrained", WARNING, "{engine} may be picked again: {reason}")
ENGINE_STOPPING = LogEvent("engine_stopping", WARNING, "{engine} is drained and not picked: {reason}")
ENGINE_PAUSED = LogEvent(
    "engine_paused", WARNING, "{engine} is not picked, requests that wait for it continue on other engines: {reason}"
)
ENGINE_RESTARTED = LogEvent("engine_restarted", WARNING, "{engine} restarted, its sequences and KV are lost: {reason}")
ENGINE_LOST = LogEvent("engine_lost", ERROR, "{engine} is not picked until it answers again: {reason}")
ENGINE_REFUSED = LogEvent("engine_refused", ERROR, "{engine} is not picked: {reason}")
ENGINE_BACK = LogEvent("engine_back", WARNING, "{engine} is picked again: {reason}")
STREAM_FALLBACK = LogEvent(
    "stream_fallback", WARNING, "{engine} sends server-sent events instead of a token stream: {reason}"
)
STREAM_BACK = LogEvent("stream_back", WARNING, "{engine} sends a token stream again: {reason}")
ADAPTER_DIFFERS = LogEvent("adapter_differs", ERROR, "{engine} is not picked for {adapter}: {reason}")
ADAPTER_LOADED = LogEvent("adapter_loaded", WARNING, "{adapter} ({path}): {reason}")
ADAPTER_MISSING = LogEvent("adapter_missing", ERROR, "{engine} is not picked for {adapter}: {reason}")
ADAPTER_UNLOADED = LogEvent(
    "adapter_unloaded", WARNING, "{adapter} gets no new requests, running ones continue: {reason}"
)
ROLE_FALLBACK = LogEvent(
    "role_fallback", WARNING, "no engine with the role {role} can be picked, other engines take its requests: {reason}"
)
ROLE_BACK = LogEvent("role_back", WARNING, "engines of the role {role} are picked again: {reason}")

PREFIX_DRIFT = LogEvent("prefix_drift", WARNING, "{engine}: its prefix cache differs from what picks predict: {reason}")
PREFIX_AGREES = LogEvent(
    "prefix_agrees", WARNING, "{engine}: its prefix cache agrees with what picks predict again: {reason}"
)

# ---- discovery of engines -------------------------------------------------------------------------------------------

DISCOVERY_LOST = LogEvent(
    "discovery_lost", ERROR, "discovery fails, the list of engines stays unchanged, {path}: {reason}"
)
DISCOVERY_BACK = LogEvent("discovery_back", WARNING, "discovery works again, {path}: {reason}")
POOL_MISSING = LogEvent("pool_missing", ERROR, "no pod of {pool} is an engine: {reason}")

# ---- programs, scheduling and the shared state ------------------------------------------------------------

PROGRAM_CHANGED = LogEvent("program_changed", WARNING, "version {version} uses the program {program}: {reason}")
PROGRAM_RETURNED = LogEvent(
    "program_returned", ERROR, "version {version} is replaced by version {to_version}, program {program}: {reason}"
)
PROGRAM_FAILED = LogEvent("program_failed", ERROR, "{program} ({seq_id}): {reason}")
PROGRAM_NOT_KEPT = LogEvent("program_not_kept", WARNING, "version {version} cannot be restored: {reason}")
SCHEDULING_CHANGED = LogEvent("scheduling_changed", WARNING, "{file}: {reason}")
RELOAD_REFUSED = LogEvent("reload_refused", ERROR, "{file} changed and its new content is not used: {reason}")
STATE_REFUSED = LogEvent("state_refused", ERROR, "version {version} stays in use: {reason}")
STATE_BEHIND = LogEvent("state_behind", ERROR, "version {version} is not in use in every process: {reason}")

# ---- requests --------------------------------------------------------------------------------------------------

FALLBACK = LogEvent("fallback", INFO, "{seq_id}: program {program} -> {to} after {tokens} tokens: {reason}")
RETRY = LogEvent("retry", INFO, "{seq_id}: retry of program {program} after {tokens} tokens: {reason}")
PREFILL_FAILED = LogEvent("prefill_failed", INFO, "{seq_id}: {engine} did not prefill: {reason}")
REQUEST_FAILED = LogEvent("request_failed", WARNING, "{seq_id}: {code}: {reason}")
MOVE = LogEvent("move", INFO, "{seq_id}: {engine} -> {to} ({reason}): {outcome}: {result}")
SESSION_MOVE = LogEvent("session_move", INFO, "{session}: {engine} -> {to}: {outcome}: {reason}")

# ---- this router -------------------------------------------------------------------------------------------

ROUTER_READY = LogEvent("router_ready", INFO, "the router serves {model} at {address}, program {program}")
WORKER_ENDED = LogEvent("worker_ended", ERROR, "worker {worker}: {reason}")
SHUTTING_DOWN = LogEvent("shutting_down", WARNING, "the router stops, {requests} requests are still running: {reason}")
