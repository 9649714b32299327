"""The configuration of a measurement, from flags and a YAML file. It is validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tercet.settings import Setting, Settings, Source, decode_settings, read_yaml
from tercet.settings.process_settings import URL_VARIABLE
from tercet_lab.bench.workloads import Phase, parse_phases
from tercet_lab.bench.workloads.conversations import Arrival, refuse
from tercet_lab.bench.workloads.recorded import is_one_trace
from tercet_lab.slo import Goodput, Slo

Positive = Annotated[float, msgspec.Meta(gt=0)]
Whole = Annotated[int, msgspec.Meta(ge=1)]
Config = TypeVar("Config", bound="BenchConfig")
PromptAs = Literal["tokens", "text"]
DEFAULT_PROMPTS = 100
TARGET, LOAD, WORK, REQUESTS, OUTPUT = "Target", "Load", "Workload", "Requests", "Output"
SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "cookie")


@dataclass(frozen=True)
class Load:
    """The load of one point.

    ``request_rate`` is in requests per second; None means a closed loop, or a trace with its recorded times.
    ``concurrency`` is the number of users of a closed loop, or the cap on requests in flight; None means no cap.
    """

    request_rate: float | None
    concurrency: int | None

    def __str__(self) -> str:
        if self.request_rate is None:
            return "as recorded" if self.concurrency is None else f"{self.concurrency} at once"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"


class BenchConfig(Settings, frozen=True):
    """The settings that ``serve`` and ``compare`` share. Settings that ``vllm bench serve`` also has keep its names.

    Each value of ``request-rate`` (requests per second) or, in a closed loop, of ``concurrency`` is a separate point.
    ``goodput`` is in milliseconds.
    """

    base_url: Annotated[str, Setting("URL of the server, without /v1", env=URL_VARIABLE, panel=TARGET)] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None, Setting("Name of the model at the server", default="the first that it lists", panel=TARGET)
    ] = None
    tokenizer: Annotated[
        str | None,
        Setting(
            "Tokenizer: `smollm2`, the directory of a checkpoint, or a hub id", default="the model's", panel=TARGET
        ),
    ] = None
    header: Annotated[
        Mapping[str, str], Setting("Header of every request; repeatable. OPENAI_API_KEY is sent if set", panel=TARGET)
    ] = {}
    request_timeout: Annotated[Positive, Setting("Timeout of one request", unit="seconds", panel=TARGET)] = 600.0
    arrival: Annotated[
        Arrival,
        Setting(
            "Arrival process. `closed`: a fixed number of users, --concurrency. `trace`: the times of the workload's "
            "trace",
            panel=LOAD,
        ),
    ] = "poisson"
    request_rate: Annotated[
        tuple[Positive, ...],
        Setting(
            "Requests per second; `inf` sends all at once. Each value is one point", metavar="R[,R...]", panel=LOAD
        ),
    ] = ()
    burstiness: Annotated[Positive, Setting("Shape of --arrival gamma. Below 1: bursts; 1: Poisson", panel=LOAD)] = 1.0
    concurrency: Annotated[
        tuple[Whole, ...],
        Setting("Number of users of a closed loop. Each value is one point", metavar="N[,N...]", panel=LOAD),
    ] = ()
    max_concurrency: Annotated[Whole | None, Setting("Maximum of requests in flight in an open loop", panel=LOAD)] = (
        None
    )
    num_prompts: Annotated[
        Whole | None,
        Setting(
            "Number of requests per point, later turns of sessions included",
            default=f"{DEFAULT_PROMPTS}; all of a trace",
            panel=LOAD,
        ),
    ] = None
    duration: Annotated[
        Positive | None,
        Setting("Time during which requests of a point arrive, instead of --num-prompts", unit="seconds", panel=LOAD),
    ] = None
    num_warmups: Annotated[
        int,
        msgspec.Meta(ge=0),
        Setting("Number of requests before the measured ones, at the same load", default="0", panel=LOAD),
    ] = 0
    workload: Annotated[
        tuple[str, ...],
        Setting(
            "Kind of requests: `sonnet`, `random`, `shared_prefix`, `sessions`, `sharegpt`, `mooncake`, `azure` or "
            "`burstgpt`; `+` mixes kinds. If repeated, each has an equal part of the run, in order",
            metavar="KIND[,KEY=VALUE...]",
            default="sonnet",
            panel=WORK,
        ),
    ] = ("sonnet",)
    seed: Annotated[int, Setting("Random seed of arrivals, lengths and words", default="0", panel=WORK)] = 0
    prompt_as: Annotated[PromptAs, Setting("Form of prompts: token ids or text", panel=WORK)] = "tokens"
    ignore_eos: Annotated[
        bool,
        Setting(
            "Generate exactly the requested number of tokens (vLLM)",
            flag="--ignore-eos/--no-ignore-eos",
            default="yes",
            panel=REQUESTS,
        ),
    ] = True
    extra_body: Annotated[Mapping[str, Any], Setting("Further fields in the body of every request", flag="")] = {}
    goodput: Annotated[Goodput | None, Setting("SLO of a good request", flag="")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        url = self.base_url
        refuse(not url.startswith(("http://", "https://")), "base-url", "is not a URL such as http://HOST:PORT")
        # Users of a closed loop each send a request after the answer to their last one.
        closed, trace = self.arrival == "closed", self.arrival == "trace"
        given, limit = bool(self.concurrency), self.max_concurrency
        phases = () if closed else self.phases  # raises for a workload that does not exist
        if closed:
            refuse(not given, "concurrency", "is missing; give the number of users of the closed loop")
            refuse(bool(self.request_rate), "request-rate", "does not apply to a closed loop; give concurrency only")
            refuse(limit is not None, "max-concurrency", "does not apply to a closed loop; give concurrency")
        else:
            refuse(given, "concurrency", "applies to arrival closed only; use max-concurrency")
            refuse(not trace and not self.request_rate, "request-rate", "is missing; give requests per second")
        refuse(self.arrival != "gamma" and self.burstiness != 1.0, "burstiness", "applies to arrival gamma only")
        refuse(trace and not is_one_trace(phases), "arrival", "trace needs exactly one workload, a recorded trace")
        if self.duration is not None:
            refuse(self.num_prompts is not None, "duration", "give either duration or num-prompts")
            refuse(closed or trace, "duration", f"does not apply to arrival {self.arrival}")
            refuse(any(map(math.isinf, self.request_rate)), "duration", "does not apply to rate inf")
        parse_phases(self.workload)

    @property
    def slo(self) -> Slo | None:
        """The limits of a good request, in seconds."""
        return None if self.goodput is None else self.goodput.slo

    @property
    def phases(self) -> tuple[Phase, ...]:
        return parse_phases(self.workload)

    @property
    def loads(self) -> tuple[Load, ...]:
        """Loads of the points, in order."""
        if self.arrival == "closed":
            return tuple(Load(None, users) for users in self.concurrency)
        return tuple(Load(rate, self.max_concurrency) for rate in self.request_rate or (None,))

    def requests_at(self, load: Load) -> int | None:
        """Return the number of measured requests of a point, or None for all requests of a trace."""
        if self.duration is not None and load.request_rate is not None:
            return max(1, math.ceil(self.duration * load.request_rate))
        return self.num_prompts or (None if is_one_trace(self.phases) else DEFAULT_PROMPTS)

    def public(self) -> dict[str, Any]:
        """Return the configuration for a result file: as in YAML, without secrets."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        # JSON has no number for infinity.
        found["request-rate"] = ["inf" if math.isinf(rate) else rate for rate in self.request_rate]
        found["header"] = {
            name: "..." if name.lower() in SECRET_HEADERS else value for name, value in self.header.items()
        }
        return found


class ServeConfig(BenchConfig, frozen=True):
    """The settings of ``tercet bench serve``: one target, measured with one program or the target's default program.

    ``label`` is the name of its line in a figure.
    """

    program: Annotated[str | None, Setting("Program that serves the requests, at a Tercet router", panel=TARGET)] = None
    label: Annotated[
        str | None, Setting("Label of this run in a figure", default="the program, or the model", panel=OUTPUT)
    ] = None


class CompareConfig(BenchConfig, frozen=True):
    """The settings of ``tercet bench compare``: programs of one router, and other servers, in interleaved rounds.

    ``also`` are other servers, by label. Ratios are relative to ``baseline`` (None: the first label). ``confidence`` is
    the coverage of their intervals, ``resamples`` the number of bootstrap samples for each.
    """

    program: Annotated[tuple[str, ...], Setting("Program of the router at --base-url; repeatable", panel=TARGET)] = ()
    also: Annotated[
        Mapping[str, str],
        Setting("Further server to measure in the same run; repeatable", metavar="NAME=URL", panel=TARGET),
    ] = {}
    baseline: Annotated[
        str | None, Setting("Label of the baseline, the denominator of all ratios", default="the first", panel=OUTPUT)
    ] = None
    rounds: Annotated[Whole, Setting("Number of measurements of each program at each load", panel=LOAD)] = 3
    confidence: Annotated[
        float, msgspec.Meta(gt=0, lt=1), Setting("Confidence level of the intervals, between 0 and 1", panel=OUTPUT)
    ] = 0.95
    resamples: Annotated[
        int, msgspec.Meta(ge=100), Setting("Number of bootstrap samples per interval", panel=OUTPUT)
    ] = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = [*self.program, *self.also]
        refuse(len(labels) < 2, "program", "a comparison needs at least two, servers of --also included")
        refuse(len(set(labels)) != len(labels), "program", "two have the same name; rename one")
        known = ", ".join(labels)
        refuse(self.baseline not in (None, *labels), "baseline", f"is {self.baseline}; choose one of {known}")
        for label, url in self.also.items():
            refuse(not url.startswith(("http://", "https://")), "also", f"{label}={url} is not NAME=URL")


def load_config(model: type[Config], file: Path | None, flags: Source) -> Config:
    """Load the configuration from a YAML file (None: no file) and ``flags``, which override the file.

    Raise :class:`~tercet.protocol.BadRequest` that names the file, the key or the flag.
    """
    return decode_settings(model, flags, *(() if file is None else (read_yaml(file),)))
