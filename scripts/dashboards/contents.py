"""The contents of the dashboards: rows and panels."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.dashboards.declared import Declared, Query
from scripts.dashboards.grafana import Dashboard, Panel, Variable

QUANTILES = (0.5, 0.9, 0.99)
ENGINE, PROGRAM, INSTANCE = '=~"$engine"', '=~"$program"', '=~"$instance"'


def dashboards(of: Declared) -> Iterator[Dashboard]:
    """Yield all dashboards. Raise :class:`ValueError` for a metric or a label that does not exist."""
    yield _fleet(of)
    yield _engine(of)
    yield _programs(of)
    yield _moves(of)
    yield _picker(of)
    yield _hits(of)


def _fleet(of: Declared) -> Dashboard:
    requests = (
        Panel("Sequences per second", (of.rate("tercet_sequences_total", "program"),)),
        Panel("TTFT", _quantiles(of, "tercet_ttft_seconds")),
        Panel("Time per output token", _quantiles(of, "tercet_tpot_seconds")),
        Panel("In flight and waiting", (of.now("tercet_requests_in_flight"), of.now("tercet_requests_queued"))),
        Panel("Wait for admission", _quantiles(of, "tercet_queue_seconds")),
        Panel("Errors per second", (of.rate("tercet_errors_total", "code"),)),
        Panel("Refused per second", (of.rate("tercet_requests_refused_total", "reason"),)),
        Panel("Retries per second", (of.rate("tercet_retries_total", "code", "stage"),)),
        Panel("Tokens per second", (of.rate("tercet_served_prompt_tokens_total"),
                                    of.rate("tercet_served_generation_tokens_total"))),
    )  # fmt: skip
    engines = (
        Panel("Mean TTFT, by the engine with the largest part of it",
              (of.mean("tercet_ttft_by_engine_seconds", "engine"),)),
        Panel("Reachable engines", (of.now("tercet_engine_up", "engine", how="max"),)),
        Panel("KV cache in use", (of.now("tercet_engine_kv_usage_ratio", "engine", how="max"),)),
        Panel("Waiting requests", (of.now("tercet_engine_waiting", "engine", how="max"),)),
        Panel("Duration of a step", (of.now("tercet_engine_step_seconds", "engine", how="max"),)),
        Panel("Duration of verbs, P99", (of.quantile(0.99, "tercet_verb_seconds", "verb"),)),
        Panel("KV between engines", (of.rate("tercet_kv_sent_bytes_total", "engine", "to"),)),
    )  # fmt: skip
    routers = (
        Panel("Serving processes", (of.now("tercet_workers", "instance"),)),
        Panel("Version of the fleet state", (of.now("tercet_fleet_state_version", "instance", how="min"),)),
        Panel("Processes that cannot apply the fleet state", (of.now("tercet_fleet_state_failed", "instance"),)),
    )
    return Dashboard("fleet", "fleet", (), (("Requests", requests), ("Engines", engines), ("Routers", routers)))


def _engine(of: Declared) -> Dashboard:
    here = {"engine": ENGINE}
    seen = (
        Panel("Requests", (of.now("tercet_engine_running", "engine", how="max", legend="{{engine}} running", **here),
                           of.now("tercet_engine_waiting", "engine", how="max", legend="{{engine}} waiting", **here))),
        Panel("Mean TTFT of requests with the largest part of it here",
              (of.mean("tercet_ttft_by_engine_seconds", "engine", **here),)),
        Panel("KV cache in use", (of.now("tercet_engine_kv_usage_ratio", "engine", how="max", **here),)),
        Panel("Duration of a step", (of.now("tercet_engine_step_seconds", "engine", how="max", **here),)),
        Panel("Tokens to compute", (of.now("tercet_engine_tokens", "engine", how="max", **here),)),
        Panel("Age of the last report", (of.now("tercet_engine_report_age_seconds", "engine", how="min", **here),)),
        Panel("Duration of verbs, P99", (of.quantile(0.99, "tercet_verb_seconds", "engine", "verb", **here),)),
        Panel("KV sent to other engines", (of.rate("tercet_kv_sent_bytes_total", "engine", "to", **here),)),
    )  # fmt: skip
    inside = (
        Panel("Time without progress", (of.now("tercet_stalled_seconds", "instance", how="max", instance=INSTANCE),)),
        Panel("KV bytes", (_own(of, "tercet_kv_bytes_sent_total", "sent"),
                           _own(of, "tercet_kv_bytes_received_total", "received"))),
        Panel("Sends", (_own(of, "tercet_kv_sends_done_total", "done"),
                        _own(of, "tercet_kv_sends_failed_total", "failed"),
                        _own(of, "tercet_kv_chunks_refused_total", "chunks refused"))),
        Panel("Leases", (of.now("tercet_kv_leases_open", "instance", legend="{{instance}} open", instance=INSTANCE),
                         of.now("tercet_fences_open", "instance", legend="{{instance}} fenced", instance=INSTANCE))),
        Panel("Leases that ended without use", (_own(of, "tercet_leases_expired_total", "expired"),
                                           _own(of, "tercet_leases_aborted_total", "aborted"))),
        Panel("Requests in vLLM", (
            of.now("vllm:num_requests_running", "instance", legend="{{instance}} running", instance=INSTANCE),
            of.now("vllm:num_requests_waiting", "instance", legend="{{instance}} waiting", instance=INSTANCE),
        )),
    )  # fmt: skip
    variables = (
        Variable("engine", of.values_of("engine", "tercet_engine_up")),
        Variable("instance", of.values_of("instance", "tercet_stalled_seconds")),
    )
    return Dashboard(
        "engine", "one engine", variables, (("Reported by routers", seen), ("Reported by the engine", inside))
    )


def _programs(of: Declared) -> Dashboard:
    here = {"program": PROGRAM}
    compared = (
        Panel("Sequences per second", (of.rate("tercet_sequences_total", "program", **here),)),
        *(Panel(f"TTFT, P{at * 100:g}", (of.quantile(at, "tercet_ttft_seconds", "program", **here),))
          for at in QUANTILES),
        *(Panel(f"Time per output token, P{at * 100:g}", (of.quantile(at, "tercet_tpot_seconds", "program", **here),))
          for at in QUANTILES),
    )  # fmt: skip
    failures = (
        Panel("Failures of programs", (of.rate("tercet_program_failures_total", "program", **here),)),
        Panel("Fallbacks", (of.rate("tercet_fallbacks_total", "program", "code", **here),)),
        Panel("Returns to the previous version", (of.rate("tercet_program_returns_total", "program", **here),)),
        Panel("Version in use", (of.now("tercet_program_version", "instance", how="max"),)),
    )
    routes = (
        Panel("Routes chosen by cost", (of.rate("tercet_routes_total", "kind", "why"),)),
        Panel("Measured over predicted", (of.mean("tercet_route_prediction_ratio", "what"),)),
    )
    variables = (Variable("program", of.values_of("program", "tercet_sequences_total")),)
    rows = (("Compared", compared), ("Failures", failures), ("Routes", routes))
    return Dashboard("programs", "programs compared", variables, rows)


def _moves(of: Declared) -> Dashboard:
    moves = (
        Panel("Moves per second", (of.rate("tercet_moves_total", "reason", "outcome"),)),
        Panel("Failed moves", (of.rate("tercet_moves_total", "code", outcome='="failed"'),)),
        Panel("Running and held back", (of.now("tercet_moves_running"), of.now("tercet_moves_held_back"))),
        Panel("Pause of the client", _quantiles(of, "tercet_move_pause_seconds")),
        Panel("KV sent by moves", (of.rate("tercet_moved_bytes_total"),)),
        Panel("Recomputed positions", (of.rate("tercet_moves_recomputed_tokens_total"),)),
        Panel("KV cache in use", (of.now("tercet_engine_kv_usage_ratio", "engine", how="max"),)),
    )
    return Dashboard("moves", "moves", (), (("Moves", moves),))


def _picker(of: Declared) -> Dashboard:
    picks = (
        Panel("Requests per second", (of.rate("inference_objective_request_total", "model_name"),)),
        Panel("Refused, by HTTP status", (of.rate("inference_objective_request_error_total", "error_code"),)),
        Panel("Refused, by reason", (of.rate("tercet_requests_refused_total", "reason"),)),
        Panel("Duration of a decision", _quantiles(of, "inference_extension_scheduler_e2e_duration_seconds")),
        Panel("Waiting requests", (of.now("inference_extension_flow_control_queue_size"),)),
        Panel("Wait for admission",
              _quantiles(of, "inference_extension_flow_control_request_queue_duration_seconds")),
        Panel("Decisions", (of.rate("llm_d_inference_scheduler_disagg_decision_total", "decision_type"),)),
        Panel("Requests by endpoint that served", (of.rate("tercet_picker_served_total", "endpoint"),)),
        Panel("Streams from Envoy", (of.now("tercet_picker_streams", "instance"),)),
        Panel("Prompt tokens per request", _quantiles(of, "inference_objective_input_tokens")),
    )  # fmt: skip
    pool = (
        Panel("Ready engines", (of.now("inference_pool_ready_pods", "name", how="max"),)),
        Panel("KV cache in use", (of.now("tercet_engine_kv_usage_ratio", "engine", how="max"),)),
        Panel("Queue of each engine", (of.now("inference_pool_per_pod_queue_size", "model_server_pod", how="max"),)),
    )
    prefills = (
        Panel("Prefills on other engines", (of.rate("tercet_prefills_total", "outcome", "code"),)),
        Panel("Engines that did not prefill", (of.rate("tercet_prefill_failures_total", "code"),)),
        Panel("Wait for a prefill", _quantiles(of, "tercet_prefill_seconds")),
    )
    return Dashboard(
        "endpoint-picker", "endpoint picker", (), (("Picks", picks), ("Pool", pool), ("Prefills", prefills))
    )


def _hits(of: Declared) -> Dashboard:
    predicted, delivered, missing = (
        f"tercet_prefix_{what}_tokens_total" for what in ("predicted", "delivered", "missing")
    )

    def panels(label: str) -> tuple[Panel, ...]:
        both = (
            of.rate(predicted, label, legend=f"{{{{{label}}}}} predicted"),
            of.rate(delivered, label, legend=f"{{{{{label}}}}} delivered"),
        )
        return (
            Panel("Predicted and delivered, tokens per second", both),
            Panel("Missing share of the predicted tokens", (of.share(missing, predicted, label),)),
            Panel("Delivered over predicted", (of.share(delivered, predicted, label),)),
        )

    picker = (Panel("Predicted share of the prompt", (of.mean("inference_extension_prefix_indexer_hit_ratio"),)),)
    rows = (("By engine", panels("engine")), ("By program", panels("program")), ("Endpoint picker", picker))
    return Dashboard("kv-hits", "KV hits predicted and delivered", (), rows)


def _quantiles(of: Declared, name: str) -> tuple[Query, ...]:
    return tuple(of.quantile(at, name) for at in QUANTILES)


def _own(of: Declared, name: str, what: str) -> Query:
    """Return the query of a counter that engines expose."""
    return of.rate(name, "instance", legend=f"{{{{instance}}}} {what}", instance=INSTANCE)
