"""What happens to a fleet and to its requests, in one vocabulary: each event is one line of the log, with its reason.

A line says the event's name, then what happened, in words; with ``--log-format json`` its fields as well. Fields are
``engine``, ``program``, ``seq_id``, ``code`` (that of the error that was the cause) and ``reason`` (why, in words),
where they apply, and few more. Events that change the fleet are warnings, what one request met is information.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tercet.settings.log_lines import EVENTS, FIELDS

logger = logging.getLogger(EVENTS)
# Without a handler, as in simulations, they are dropped instead of going to standard error.
logger.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class LogEvent:
    """A kind of event; ``words`` say it, with the fields in their places."""

    name: str
    level: int
    words: str

    def tell(self, cause: BaseException | None = None, /, **fields: object) -> None:
        """It has happened. ``cause`` is for those whose reason takes a traceback to understand."""
        if logger.isEnabledFor(self.level):
            said = {FIELDS: {"event": self.name, **fields}}
            logger.log(self.level, "%s: %s", self.name, self.words.format_map(fields), extra=said, exc_info=cause)


INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR

# ---- engines ---------------------------------------------------------------------------------------------------

ENGINE_ADDED = LogEvent("engine_added", WARNING, "{engine} ({url}) has the role {role}: {reason}")
ENGINE_REMOVED = LogEvent("engine_removed", WARNING, "{engine}, what runs on it goes on: {reason}")
ENGINE_ROLE = LogEvent("engine_role", WARNING, "{engine} has the role {role}, before {before}: {reason}")
ENGINE_DRAINED = LogEvent("engine_drained", WARNING, "{engine} is emptied, and not picked: {reason}")
ENGINE_UNDRAINED = LogEvent("engine_undrained", WARNING, "{engine} may be picked again: {reason}")
ENGINE_STOPPING = LogEvent("engine_stopping", WARNING, "{engine} is emptied, and not picked: {reason}")
ENGINE_PAUSED = LogEvent(
    "engine_paused", WARNING, "{engine} is not picked, and what waits for it goes on elsewhere: {reason}"
)
ENGINE_RESTARTED = LogEvent("engine_restarted", WARNING, "what {engine} held is void: {reason}")
ENGINE_LOST = LogEvent("engine_lost", ERROR, "{engine} is not picked until it is well: {reason}")
ENGINE_REFUSED = LogEvent("engine_refused", ERROR, "{engine} is not picked: {reason}")
ENGINE_BACK = LogEvent("engine_back", WARNING, "{engine} is picked again: {reason}")
STREAM_FALLBACK = LogEvent("stream_fallback", WARNING, "{engine}: token stream -> server-sent events: {reason}")
STREAM_BACK = LogEvent("stream_back", WARNING, "{engine} has its token stream again: {reason}")
ADAPTER_DIFFERS = LogEvent("adapter_differs", ERROR, "{engine} is not picked for {adapter}: {reason}")
ADAPTER_LOADED = LogEvent("adapter_loaded", WARNING, "{adapter} ({path}): {reason}")
ADAPTER_MISSING = LogEvent("adapter_missing", ERROR, "{engine} is not picked for {adapter}: {reason}")
ADAPTER_UNLOADED = LogEvent("adapter_unloaded", WARNING, "{adapter}, what runs with it goes on: {reason}")
ROLE_FALLBACK = LogEvent("role_fallback", WARNING, "{role} -> any engine that answers: {reason}")
ROLE_BACK = LogEvent("role_back", WARNING, "engines of the role {role} are picked again: {reason}")

PREFIX_DRIFT = LogEvent("prefix_drift", WARNING, "{engine}: picks predict what its cache does not have: {reason}")
PREFIX_AGREES = LogEvent("prefix_agrees", WARNING, "{engine}: picks predict what its cache has again: {reason}")

# ---- finding engines -------------------------------------------------------------------------------------------

DISCOVERY_LOST = LogEvent("discovery_lost", ERROR, "the engines stay as they are, {path}: {reason}")
DISCOVERY_BACK = LogEvent("discovery_back", WARNING, "engines are followed again, {path}: {reason}")
POOL_MISSING = LogEvent("pool_missing", ERROR, "no pod of {pool} is an engine: {reason}")

# ---- programs, scheduling and the state that has them ------------------------------------------------------------

PROGRAM_CHANGED = LogEvent("program_changed", WARNING, "version {version}, {program}: {reason}")
PROGRAM_RETURNED = LogEvent("program_returned", ERROR, "version {version} -> {to_version}: {program}: {reason}")
PROGRAM_FAILED = LogEvent("program_failed", ERROR, "{program} ({seq_id}): {reason}")
PROGRAM_NOT_KEPT = LogEvent("program_not_kept", WARNING, "version {version} cannot be returned to: {reason}")
SCHEDULING_CHANGED = LogEvent("scheduling_changed", WARNING, "{file}: {reason}")
RELOAD_REFUSED = LogEvent("reload_refused", ERROR, "{file} has changed and is not used: {reason}")
STATE_REFUSED = LogEvent("state_refused", ERROR, "version {version} goes on: {reason}")
STATE_BEHIND = LogEvent("state_behind", ERROR, "version {version} is not in use everywhere: {reason}")

# ---- requests --------------------------------------------------------------------------------------------------

FALLBACK = LogEvent("fallback", INFO, "{seq_id}: {program} -> {to} after {tokens} tokens: {reason}")
RETRY = LogEvent("retry", INFO, "{seq_id}: {program} again after {tokens} tokens: {reason}")
PREFILL_FAILED = LogEvent("prefill_failed", INFO, "{seq_id}: {engine} does not prefill: {reason}")
REQUEST_FAILED = LogEvent("request_failed", WARNING, "{seq_id}: {code}: {reason}")
MOVE = LogEvent("move", INFO, "{seq_id}: {engine} -> {to} ({reason}): {outcome}: {result}")
SESSION_MOVE = LogEvent("session_move", INFO, "{session}: {engine} -> {to}: {outcome}: {reason}")

# ---- this router -------------------------------------------------------------------------------------------

ROUTER_READY = LogEvent("router_ready", INFO, "it serves {model} at {address}, program {program}")
WORKER_ENDED = LogEvent("worker_ended", ERROR, "worker {worker}: {reason}")
SHUTTING_DOWN = LogEvent("shutting_down", WARNING, "requests left: {requests}: {reason}")
