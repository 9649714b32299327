"""The description of a simulated fleet, in one line or a YAML file, and its synthetic traffic."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from tercet.protocol import BadRequest, Request, Role
from tercet.settings.declaration import complaint
from tercet.settings.decoding import load_yaml

SHORT = re.compile(r"(\d+)P(\d+)D(@[^,=@]+)?")
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


class EngineGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of ``count`` equal engines.

    ``profile`` (a shipped name or a JSON file) and ``options`` override those of the run. Engines with the same
    ``host`` share a machine: they slow each other while they compute, according to their profiles. With None, each
    engine has its own machine.
    """

    role: Role
    count: int = 1
    host: str | None = None
    profile: str | None = None
    options: Mapping[str, Any] = {}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault of engine ``engine`` at second ``at``, which ends ``down`` seconds later (None: never).

    ``die``: the engine loses everything, and restarts with an empty cache. ``freeze``: its core stops, as after
    SIGSTOP. ``drain``: the router moves its sequences away and picks it for nothing new.
    """

    engine: str
    at: float
    down: float | None = None
    kind: Literal["die", "freeze", "drain"] = "die"


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A simulated fleet. The names of its engines are role and number: ``prefill-0``, ``decode-0``, ``both-0``, ...

    Engines that cannot send KV to each other are refused unless ``without_kv_exchange`` is set.
    """

    engines: tuple[EngineGroup, ...]
    faults: tuple[Fault, ...] = ()
    without_kv_exchange: bool = False


def parse_fleet(given: str) -> FleetSpec:
    """Return the fleet of a text: ``ROLE=COUNT[@HOST][,...]``, ``2P6D[@HOST]`` or the path of a YAML file.

    Raise :class:`~tercet.protocol.BadRequest` for an invalid one.
    """
    short = SHORT.fullmatch(given)
    if short:
        host = short[3] or ""
        given = f"prefill={short[1]}{host},decode={short[2]}{host}"
    spec = FleetSpec(engines=tuple(_group(part) for part in given.split(","))) if "=" in given else _from_file(given)
    return _checked(spec)


def _group(part: str) -> EngineGroup:
    role, _, rest = part.partition("=")
    count, at, host = rest.partition("@")
    if role not in ROLES:
        raise BadRequest(f"fleet: {role!r} is not a role; choose {', '.join(ROLES)}", "fleet")
    if not count.isdecimal() or bool(at) != bool(host):
        raise BadRequest(f"fleet: {part!r} is not ROLE=COUNT[@HOST]", "fleet")
    return EngineGroup(role=role, count=int(count), host=host or None)


def _from_file(path: str) -> FleetSpec:
    file = Path(path).expanduser()
    if not file.is_file():
        raise BadRequest(f"fleet: {path!r} is not ROLE=COUNT[@HOST][,...], a fleet such as 2P6D, or a file", "fleet")
    content = load_yaml(file, f"fleet: {path}", "fleet")
    try:
        return msgspec.convert(content, FleetSpec)
    except msgspec.ValidationError as error:
        raise complaint(f"fleet: {path}: $", FleetSpec, content, error, "fleet") from error


def _checked(spec: FleetSpec) -> FleetSpec:
    if not spec.engines or any(group.count < 1 for group in spec.engines):
        raise BadRequest("fleet: every group needs at least one engine", "fleet")
    names = set(names_of(spec))
    for fault in spec.faults:
        if fault.engine not in names:
            raise BadRequest(
                f"fleet: faults: engine {fault.engine!r} does not exist; names are such as decode-0",
                "fleet",
            )
        if fault.at < 0 or (fault.down is not None and fault.down <= 0):
            raise BadRequest(f"fleet: faults: {fault.engine}: at must be 0 s or more, and down more than 0 s", "fleet")
    return spec


def names_of(spec: FleetSpec) -> list[str]:
    """Return the names of a fleet's engines, in order."""
    return [f"{group.role}-{index}" for group, index in members_of(spec)]


def members_of(spec: FleetSpec) -> list[tuple[EngineGroup, int]]:
    """Return, for each engine, its group and its number among the engines of its role."""
    seen: dict[str, int] = {}
    found: list[tuple[EngineGroup, int]] = []
    for group in spec.engines:
        for _ in range(group.count):
            index = seen[group.role] = seen.get(group.role, -1) + 1
            found.append((group, index))
    return found


# A prompt is one unique token id and then a part of one list of token ids. The list has ids below 256 only: Python has
# one object for each, so prompts stay in the processor's caches when they are copied and hashed.
_TEXT = 65_536
_FIRST_UNIQUE_TOKEN = 1_000_000
LONGEST = 20.0


class SyntheticWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A synthetic workload of ``requests`` requests. Lengths are in tokens, at least 1.

    ``rate`` is in requests per second. ``arrivals``: ``poisson``; ``constant``; ``gamma`` with the shape
    ``burstiness``, as in ``tercet bench``: below 1 is bursty, 1 is Poisson. The first ``warm_up`` requests are in no
    metric. If ``prefixes`` is not 0, each request starts with one of that number of prefixes of ``prefix`` tokens
    (drawn uniformly), as a part of its input length. ``lengths``: ``normal``; ``lognormal`` with the same means and
    standard deviations, which has a long tail, up to :data:`LONGEST` times the mean.
    """

    rate: float
    requests: int
    input_mean: float = 512
    input_dev: float = 0
    output_mean: float = 128
    output_dev: float = 0
    arrivals: Literal["poisson", "constant", "gamma"] = "poisson"
    burstiness: float = 1.0
    warm_up: int = 0
    prefixes: int = 0
    prefix: int = 0
    lengths: Literal["normal", "lognormal"] = "normal"

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        for field in ("rate", "input_mean", "output_mean", "burstiness"):
            if not getattr(self, field) > 0:
                raise BadRequest(f"{field}: is {getattr(self, field)}, and must be positive", field)
        for field in ("input_dev", "output_dev", "warm_up", "prefixes", "prefix"):
            if not getattr(self, field) >= 0:
                raise BadRequest(f"{field}: is {getattr(self, field)}, and must not be negative", field)
        if self.requests <= self.warm_up:
            raise BadRequest(f"requests: is {self.requests}, and must exceed warm_up, {self.warm_up}", "requests")
        if bool(self.prefixes) != bool(self.prefix):
            raise BadRequest("prefixes: give it together with prefix, their length in tokens", "prefixes")


def requests_of(workload: SyntheticWorkload, seed: int) -> Iterator[tuple[float, Request]]:
    """Yield ``(arrival time in seconds, request)`` in the order of arrival. Equal seeds give equal requests."""
    when, chance = 0.0, random.Random(f"{seed} lengths")
    text = _text(seed) * 2
    prefixes = [_prompt(text, chance, index, workload.prefix) for index in range(workload.prefixes)]
    draw = _normal if workload.lengths == "normal" else _lognormal
    gaps = gaps_of(workload.arrivals, workload.rate, workload.burstiness, random.Random(f"{seed} arrivals"))
    for number in range(workload.requests):
        when += next(gaps)
        length = draw(chance, workload.input_mean, workload.input_dev)
        prefix = chance.choice(prefixes)[: length - 1] if prefixes else ()
        prompt = prefix + _prompt(text, chance, len(prefixes) + number, length - len(prefix))
        output = draw(chance, workload.output_mean, workload.output_dev)
        yield when, Request(seq_id=f"r{number}", prompt=prompt, sampling_params={"max_tokens": output})


@lru_cache(maxsize=4)
def _text(seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{seed} text").randbytes(_TEXT))


def gaps_of(arrivals: str, rate: float, burstiness: float, chance: random.Random) -> Iterator[float]:
    """Return an endless iterator of gaps between arrivals, in seconds; 0 at an infinite rate.

    ``arrivals`` and ``burstiness`` are those of :class:`SyntheticWorkload`.
    """
    if math.isinf(rate):
        return itertools.repeat(0.0)
    mean = 1 / rate
    if arrivals == "constant":
        return itertools.repeat(mean)
    if arrivals == "poisson":
        return iter(lambda: chance.expovariate(rate), None)
    return iter(lambda: chance.gammavariate(burstiness, mean / burstiness), None)


def _normal(chance: random.Random, mean: float, dev: float) -> int:
    return max(1, round(chance.gauss(mean, dev) if dev else mean))


def _lognormal(chance: random.Random, mean: float, dev: float) -> int:
    sigma = math.sqrt(math.log1p((dev / mean) ** 2))
    return max(1, round(min(chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), LONGEST * mean)))


def _prompt(text: tuple[int, ...], chance: random.Random, number: int, length: int) -> tuple[int, ...]:
    start = chance.randrange(_TEXT)
    body = text[start : start + length - 1] if length <= _TEXT else (text * (length // _TEXT + 1))[: length - 1]
    return (_FIRST_UNIQUE_TOKEN + number,) + body  # noqa: RUF005 - one copy instead of two
