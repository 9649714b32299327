"""What to measure: validated once, from flags and a YAML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tercet.bench.arrivals import Arrival
from tercet.bench.openai_client import Endpoint, PromptAs, Sampling
from tercet.bench.summary import Slo
from tercet.bench.workloads import Phase, parse_phases
from tercet.protocol import BadRequest
from tercet.settings import Settings, decode_settings, read_yaml

Positive = Annotated[float, msgspec.Meta(gt=0)]
Whole = Annotated[int, msgspec.Meta(ge=1)]
Config = TypeVar("Config", bound="BenchConfig")
DEFAULT_PROMPTS = 100
SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "cookie")


@dataclass(frozen=True)
class Load:
    """How hard a point presses: requests per second (None: closed loop, or a trace as recorded), and how many users."""

    request_rate: float | None
    concurrency: int | None

    def __str__(self) -> str:
        if self.request_rate is None:
            return "as recorded" if self.concurrency is None else f"{self.concurrency} at once"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"


class BenchConfig(Settings, frozen=True):
    """What ``serve`` and ``compare`` share; names as in ``vllm bench serve`` where it has the same thing.

    Each value of ``request-rate`` (requests per second) or, in a closed loop, of ``concurrency`` is a point of its own.
    ``goodput`` is in milliseconds. ``prompt-as`` is text in a chat and tokens elsewhere, if None. ``cache-salt``:
    whether requests of one point can match a prefix of another one; ``auto`` salts fixed texts, which would be found
    again.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = "completions"
    prompt_as: PromptAs | None = None
    model: str | None = None
    tokenizer: str | None = None
    workload: tuple[str, ...] = ("sonnet",)
    arrival: Arrival = "poisson"
    burstiness: Positive = 1.0
    request_rate: tuple[Positive, ...] = ()
    concurrency: tuple[Whole, ...] = ()
    max_concurrency: Whole | None = None
    num_prompts: Whole | None = None
    duration: Positive | None = None
    num_warmups: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: int = 0
    request_timeout: Positive = 600.0
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = {}
    header: Mapping[str, str] = {}
    goodput: Slo | None = None
    cache_salt: Literal["auto", "always", "never"] = "auto"
    save_records: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        closed, trace = self.arrival == "closed", self.arrival == "trace"
        _refuse(not self.base_url.startswith(("http://", "https://")), "base-url", "is no URL such as http://HOST:PORT")
        _refuse(closed and not self.concurrency, "concurrency", "is missing; a closed loop needs its number of users")
        _refuse(closed and bool(self.request_rate), "request-rate", "a closed loop has none; give concurrency alone")
        _refuse(not closed and bool(self.concurrency), "concurrency", "belongs to arrival closed; see max-concurrency")
        _refuse(closed and self.max_concurrency is not None, "max-concurrency", "in a closed loop, concurrency says it")
        _refuse(not closed and not trace and not self.request_rate, "request-rate", "is missing")
        _refuse(self.arrival != "gamma" and self.burstiness != 1.0, "burstiness", "belongs to arrival gamma")
        _refuse(self.num_prompts is not None and self.duration is not None, "duration", "give it or num-prompts")
        _refuse((closed or trace) and self.duration is not None, "duration", f"says nothing for arrival {self.arrival}")
        _refuse(any(map(math.isinf, self.request_rate)) and self.duration is not None, "duration", "with rate inf")
        _refuse(self.endpoint == "chat" and self.prompt_as == "tokens", "prompt-as", "chat takes text only")
        phases = self.phases
        recorded = all(kind.finite for phase in phases for kind in phase.mix) and len(phases) == 1
        _refuse(trace and not (recorded and len(phases[0].mix) == 1), "arrival", "trace needs one workload: a trace")

    @property
    def form(self) -> PromptAs:
        """How prompts are put."""
        return self.prompt_as or ("text" if self.endpoint == "chat" else "tokens")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The workload's phases."""
        return parse_phases(self.workload)

    @property
    def sampling(self) -> Sampling:
        """What is sent with every request."""
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
        """How many requests a point measures; None for all of a trace."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.duration is not None and load.request_rate is not None:
            return max(1, math.ceil(self.duration * load.request_rate))
        finite = len(self.phases) == 1 and len(mix := self.phases[0].mix) == 1 and mix[0].finite
        return None if finite else DEFAULT_PROMPTS

    def public(self) -> dict[str, Any]:
        """The configuration as it goes into a file: as in YAML, without secrets."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        # JSON knows no infinity.
        found["request-rate"] = ["inf" if math.isinf(rate) else rate for rate in self.request_rate]
        found["header"] = {
            name: "..." if name.lower() in SECRET_HEADERS else value for name, value in self.header.items()
        }
        return found


class ServeConfig(BenchConfig, frozen=True):
    """One target, under one program or whatever it runs. ``label`` is its line in a figure."""

    program: str | None = None
    label: str | None = None


class CompareConfig(BenchConfig, frozen=True):
    """Several programs of one front door, and other servers beside it, in interleaved rounds.

    ``also`` are other servers, by label. Ratios are against ``baseline``, the first one if None. ``confidence`` is the
    coverage of their intervals, ``resamples`` how many bootstrap samples each is made from.
    """

    program: tuple[str, ...] = ()
    also: Mapping[str, str] = {}
    baseline: str | None = None
    rounds: Whole = 3
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95
    resamples: Annotated[int, msgspec.Meta(ge=100)] = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = [*self.program, *self.also]
        _refuse(len(labels) < 2, "program", "there must be two or more to compare; --also counts")
        _refuse(len(set(labels)) != len(labels), "program", "two have the same name")
        known = ", ".join(labels)
        _refuse(self.baseline not in (None, *labels), "baseline", f"is {self.baseline}, and none of {known}")
        for label, url in self.also.items():
            _refuse(not url.startswith(("http://", "https://")), "also", f"{label}={url} is no NAME=URL")


def load_config(model: type[Config], file: Path | None, flags: Mapping[str, Any]) -> Config:
    """The configuration of a YAML file with ``flags`` over it.

    Raises :class:`~tercet.protocol.BadRequest` that names the file, the key, or the flag.
    """
    return decode_settings(model, flags, *(() if file is None else (read_yaml(file),)))


def _refuse(wrong: bool, field: str, why: str) -> None:
    if wrong:
        raise BadRequest(f"{field}: {why}", field)
