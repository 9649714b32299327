"""Configuration of a measurement: validated once, from flags and a YAML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tercet.lab.bench.arrivals import Arrival
from tercet.lab.bench.openai_client import Endpoint, PromptAs, Sampling
from tercet.lab.bench.summary import Slo
from tercet.lab.bench.workloads import Phase, parse_phases
from tercet.protocol import BadRequest
from tercet.settings import Setting, Settings, Source, decode_settings, read_yaml
from tercet.settings.variables import URL_VARIABLE

Positive = Annotated[float, msgspec.Meta(gt=0)]
Whole = Annotated[int, msgspec.Meta(ge=1)]
Config = TypeVar("Config", bound="BenchConfig")
DEFAULT_PROMPTS = 100
TARGET, LOAD, WORK, REQUESTS, OUTPUT = "Target", "Load", "Workload", "Requests", "Output"
SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "cookie")


@dataclass(frozen=True)
class Load:
    """Load of one point: requests per second (None: closed loop, or a trace as recorded), and the number of users."""

    request_rate: float | None
    concurrency: int | None

    def __str__(self) -> str:
        if self.request_rate is None:
            return "as recorded" if self.concurrency is None else f"{self.concurrency} at once"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"


class BenchConfig(Settings, frozen=True):
    """Common settings of ``serve`` and ``compare``, with the names of ``vllm bench serve`` where they exist.

    Each value of ``request-rate`` (requests per second) or, in a closed loop, of ``concurrency`` is a separate point.
    ``goodput`` is in milliseconds. ``prompt-as`` is by default text in a chat and tokens elsewhere. ``cache-salt``:
    whether requests of one point can match a prefix of another one; ``auto`` salts fixed texts, which would otherwise
    match.
    """

    base_url: Annotated[str, Setting("The server, without /v1", env=URL_VARIABLE, panel=TARGET)] = (
        "http://127.0.0.1:8000"
    )
    endpoint: Annotated[Endpoint, Setting("The API to use", panel=TARGET)] = "completions"
    model: Annotated[str | None, Setting("The model's name there", default="its first", panel=TARGET)] = None
    tokenizer: Annotated[
        str | None,
        Setting("`smollm2`, a checkpoint's directory or a hub id", default="the model's", panel=TARGET),
    ] = None
    header: Annotated[
        Mapping[str, str], Setting("A header of every request; repeatable. OPENAI_API_KEY is sent if set", panel=TARGET)
    ] = {}
    request_timeout: Annotated[Positive, Setting("Timeout of a request", unit="seconds", panel=TARGET)] = 600.0
    arrival: Annotated[
        Arrival,
        Setting(
            "`closed`: as many users as --concurrency says. `trace`: at the times of the workload's trace", panel=LOAD
        ),
    ] = "poisson"
    request_rate: Annotated[
        tuple[Positive, ...],
        Setting("Requests per second; `inf` for all at once. Each is a point", metavar="R[,R...]", panel=LOAD),
    ] = ()
    burstiness: Annotated[
        Positive, Setting("Shape of --arrival gamma. Below 1 is bursty, 1 is Poisson", panel=LOAD)
    ] = 1.0
    concurrency: Annotated[
        tuple[Whole, ...], Setting("Users of a closed loop. Each is a point", metavar="N[,N...]", panel=LOAD)
    ] = ()
    max_concurrency: Annotated[Whole | None, Setting("Cap on requests in flight of an open loop", panel=LOAD)] = None
    num_prompts: Annotated[
        Whole | None,
        Setting(
            "Requests per point, later turns of sessions included",
            default=f"{DEFAULT_PROMPTS}; all of a trace",
            panel=LOAD,
        ),
    ] = None
    duration: Annotated[
        Positive | None, Setting("Instead of --num-prompts: arrivals per point", unit="seconds", panel=LOAD)
    ] = None
    num_warmups: Annotated[
        int,
        msgspec.Meta(ge=0),
        Setting("Requests before those that are measured, at the same load", default="0", panel=LOAD),
    ] = 0
    workload: Annotated[
        tuple[str, ...],
        Setting(
            "`sonnet`, `random`, `shared_prefix`, `sessions`, `sharegpt`, `mooncake`, `azure`, `burstgpt`; `+` mixes "
            "kinds. Given again, it takes over half-way",
            metavar="KIND[,KEY=VALUE...]",
            default="sonnet",
            panel=WORK,
        ),
    ] = ("sonnet",)
    seed: Annotated[int, Setting("Random seed for arrivals, lengths and words", default="0", panel=WORK)] = 0
    prompt_as: Annotated[
        PromptAs | None,
        Setting("Whether prompts are sent as token ids or as text", default="tokens; text in a chat", panel=WORK),
    ] = None
    cache_salt: Annotated[
        Literal["auto", "always", "never"],
        Setting(
            "Whether points are kept from finding each other's prefixes",
            default="auto: for texts from a file",
            panel=WORK,
        ),
    ] = "auto"
    temperature: Annotated[float, msgspec.Meta(ge=0), Setting("Sampling temperature", default="0", panel=REQUESTS)] = (
        0.0
    )
    top_p: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1)] | None, Setting("Nucleus sampling, as top_p", panel=REQUESTS)
    ] = None
    ignore_eos: Annotated[
        bool,
        Setting(
            "Whether answers have exactly the length asked for (vLLM)",
            flag="--ignore-eos/--no-ignore-eos",
            default="yes",
            panel=REQUESTS,
        ),
    ] = True
    extra_body: Annotated[Mapping[str, Any], Setting("More fields of every request's body", flag="")] = {}
    goodput: Annotated[Slo | None, Setting("The SLO", flag="")] = None
    save_detailed: Annotated[
        bool,
        Setting(
            "Whether the file has every request's times",
            flag="--save-detailed/--no-save-detailed",
            default="yes",
            panel=OUTPUT,
        ),
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        closed, trace = self.arrival == "closed", self.arrival == "trace"
        _refuse(
            not self.base_url.startswith(("http://", "https://")), "base-url", "is not a URL such as http://HOST:PORT"
        )
        _refuse(closed and not self.concurrency, "concurrency", "is missing; give a closed loop its number of users")
        _refuse(closed and bool(self.request_rate), "request-rate", "a closed loop has none; give only concurrency")
        _refuse(not closed and bool(self.concurrency), "concurrency", "belongs to arrival closed; see max-concurrency")
        _refuse(closed and self.max_concurrency is not None, "max-concurrency", "in a closed loop, concurrency says it")
        _refuse(not closed and not trace and not self.request_rate, "request-rate", "is missing")
        _refuse(self.arrival != "gamma" and self.burstiness != 1.0, "burstiness", "belongs to arrival gamma")
        _refuse(self.num_prompts is not None and self.duration is not None, "duration", "give it or num-prompts")
        _refuse(
            (closed or trace) and self.duration is not None, "duration", f"has no meaning for arrival {self.arrival}"
        )
        _refuse(any(map(math.isinf, self.request_rate)) and self.duration is not None, "duration", "with rate inf")
        _refuse(self.endpoint == "chat" and self.prompt_as == "tokens", "prompt-as", "chat takes text only")
        phases = self.phases
        recorded = all(kind.finite for phase in phases for kind in phase.mix) and len(phases) == 1
        _refuse(trace and not (recorded and len(phases[0].mix) == 1), "arrival", "trace needs one workload: a trace")

    @property
    def form(self) -> PromptAs:
        """Form in which prompts are sent."""
        return self.prompt_as or ("text" if self.endpoint == "chat" else "tokens")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The workload's phases."""
        return parse_phases(self.workload)

    @property
    def sampling(self) -> Sampling:
        """Parameters that are sent with every request."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, ignore_eos=self.ignore_eos, extra=self.extra_body
        )

    @property
    def loads(self) -> tuple[Load, ...]:
        """The points of the sweep, in order."""
        if self.arrival == "closed":
            return tuple(Load(None, users) for users in self.concurrency)
        return tuple(Load(rate, self.max_concurrency) for rate in self.request_rate or (None,))

    def requests_at(self, load: Load) -> int | None:
        """Number of measured requests of a point; None for all of a trace."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.duration is not None and load.request_rate is not None:
            return max(1, math.ceil(self.duration * load.request_rate))
        finite = len(self.phases) == 1 and len(mix := self.phases[0].mix) == 1 and mix[0].finite
        return None if finite else DEFAULT_PROMPTS

    def public(self) -> dict[str, Any]:
        """The configuration for a result file: as in YAML, without secrets."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        # JSON has no infinity.
        found["request-rate"] = ["inf" if math.isinf(rate) else rate for rate in self.request_rate]
        found["header"] = {
            name: "..." if name.lower() in SECRET_HEADERS else value for name, value in self.header.items()
        }
        return found


class ServeConfig(BenchConfig, frozen=True):
    """One target, under one program or its own. ``label`` is the name of its line in a figure."""

    program: Annotated[str | None, Setting("The program that serves, on a Tercet router", panel=TARGET)] = None
    label: Annotated[
        str | None,
        Setting("Label of this run in a figure", default="the program that serves, or the model", panel=OUTPUT),
    ] = None


class CompareConfig(BenchConfig, frozen=True):
    """Several programs of one router, and other servers, in interleaved rounds.

    ``also`` are other servers, by label. Ratios are relative to ``baseline``, the first one if None. ``confidence`` is
    the coverage of their intervals, ``resamples`` how many bootstrap samples each is made from.
    """

    program: Annotated[tuple[str, ...], Setting("A program of the router at --base-url; repeatable", panel=TARGET)] = ()
    also: Annotated[
        Mapping[str, str],
        Setting("Another server to measure in the same run; repeatable", metavar="NAME=URL", panel=TARGET),
    ] = {}
    baseline: Annotated[
        str | None, Setting("Label of the run that others are divided by", default="the first", panel=OUTPUT)
    ] = None
    rounds: Annotated[Whole, Setting("Measurements of each at each load", panel=LOAD)] = 3
    confidence: Annotated[
        float, msgspec.Meta(gt=0, lt=1), Setting("Confidence level of the intervals", panel=OUTPUT)
    ] = 0.95
    resamples: Annotated[int, msgspec.Meta(ge=100), Setting("Bootstrap samples", panel=OUTPUT)] = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = [*self.program, *self.also]
        _refuse(len(labels) < 2, "program", "there must be two or more to compare; --also counts")
        _refuse(len(set(labels)) != len(labels), "program", "two have the same name")
        known = ", ".join(labels)
        _refuse(self.baseline not in (None, *labels), "baseline", f"is {self.baseline}, and none of {known}")
        for label, url in self.also.items():
            _refuse(not url.startswith(("http://", "https://")), "also", f"{label}={url} is not NAME=URL")


def load_config(model: type[Config], file: Path | None, flags: Source) -> Config:
    """Load the configuration from a YAML file and ``flags``, which override it.

    Raises :class:`~tercet.protocol.BadRequest` that names the file, the key, or the flag.
    """
    return decode_settings(model, flags, *(() if file is None else (read_yaml(file),)))


def _refuse(wrong: bool, field: str, why: str) -> None:
    if wrong:
        raise BadRequest(f"{field}: {why}", field)
