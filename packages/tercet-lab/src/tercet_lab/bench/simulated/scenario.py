"""The description of a simulated fleet, in one line or a YAML file, and its traffic.

Traffic is synthetic, or a workload of ``tercet bench``, whose text gives the same plan of requests. Requests have
classes with their own objectives.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec

from tercet.protocol import BadRequest, Request, Role
from tercet.protocol.names import STORE, chosen_by_weight
from tercet.settings.declaration import complaint, load_yaml
from tercet.settings.fleet_settings import DEFAULT_CLASS, ObjectiveClass, Objectives
from tercet_lab.bench.workloads import Conversation, parse_phases, plan
from tercet_lab.bench.workloads.conversations import HashedWords, gaps_of, lengths, refuse, replayed
from tercet_lab.bench.workloads.recorded import is_one_trace
from tercet_lab.bench.workloads.rows import RecordedRows
from tercet_lab.sim.engine_options import StoreSpec
from tercet_lab.slo import Slo

SHORT = re.compile(r"(\d+)P(\d+)D(@[^,=@]+)?")
SIZES = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)(?:\+(\d+(?:\.\d+)?)([kMG]?))?")
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
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
    """A simulated fleet. Names are role and number: ``prefill-0``, ``decode-0``, ``both-0``, ``store-0``, ...

    Engines that cannot send KV to each other are refused unless ``without_kv_exchange`` is set.
    """

    engines: tuple[EngineGroup, ...]
    stores: tuple[StoreSpec, ...] = ()
    faults: tuple[Fault, ...] = ()
    without_kv_exchange: bool = False


def parse_fleet(given: str) -> FleetSpec:
    """Return the fleet of a text: ``ROLE=COUNT[@HOST][,...]``, ``2P6D[@HOST]`` or the path of a YAML file.

    ``store=TOKENS[+TOKENS]`` is a store with room in memory and on disk.
    Raise :class:`~tercet.protocol.BadRequest` for an invalid one.
    """
    head, comma, rest = given.partition(",")
    short = SHORT.fullmatch(head)
    if short:
        host = short[3] or ""
        given = f"prefill={short[1]}{host},decode={short[2]}{host}{comma}{rest}"
    if "=" not in given:
        return checked_fleet(_from_file(given))
    parts = given.split(",")
    stores = tuple(_store(part[len(STORE) + 1 :]) for part in parts if part.startswith(f"{STORE}="))
    groups = tuple(_group(part) for part in parts if not part.startswith(f"{STORE}="))
    return checked_fleet(FleetSpec(engines=groups, stores=stores))


def _store(given: str) -> StoreSpec:
    sizes = SIZES.fullmatch(given)
    if sizes is None:
        raise BadRequest(
            f"fleet: store={given} is not store=TOKENS[+TOKENS], in memory and on disk, such as 8M+100M", "fleet"
        )
    memory, disk = (int(float(sizes[at] or 0) * UNITS[sizes[at + 1] or ""]) for at in (1, 3))
    return StoreSpec(tokens=memory, disk_tokens=disk)


def _group(part: str) -> EngineGroup:
    role, _, rest = part.partition("=")
    count, at, host = rest.partition("@")
    if role not in ROLES:
        raise BadRequest(f"fleet: {role!r} is not a role; choose {', '.join(ROLES)}", "fleet")
    refuse(not count.isdecimal() or bool(at) != bool(host), "fleet", f"{part!r} is not ROLE=COUNT[@HOST]")
    return EngineGroup(role=role, count=int(count), host=host or None)


def _from_file(path: str) -> FleetSpec:
    file = Path(path).expanduser()
    forms = "ROLE=COUNT[@HOST][,...], a fleet such as 2P6D, or a file"
    refuse(not file.is_file(), "fleet", f"{path!r} is not {forms}")
    content = load_yaml(file, f"fleet: {path}", "fleet")
    try:
        return msgspec.convert(content, FleetSpec)
    except msgspec.ValidationError as error:
        raise complaint(f"fleet: {path}: $", FleetSpec, content, error, "fleet") from error


def checked_fleet(spec: FleetSpec) -> FleetSpec:
    """Return the fleet; raise :class:`~tercet.protocol.BadRequest` if it is empty, or for a fault that cannot be."""
    empty = not spec.engines or any(group.count < 1 for group in spec.engines)
    refuse(empty, "fleet", "every group needs at least one engine")
    names = {*names_of(spec), *store_names(spec)}
    for fault in spec.faults:
        unknown = f"faults: engine {fault.engine!r} does not exist; names are such as decode-0"
        refuse(fault.engine not in names, "fleet", unknown)
        wrong = fault.at < 0 or (fault.down is not None and fault.down <= 0)
        refuse(wrong, "fleet", f"faults: {fault.engine}: at must be 0 s or more, and down more than 0 s")
    return spec


def names_of(spec: FleetSpec) -> list[str]:
    """Return the names of a fleet's engines, in order."""
    return [f"{group.role}-{index}" for group, index in members_of(spec)]


def store_names(spec: FleetSpec) -> list[str]:
    """Return the names of a fleet's stores, in order."""
    return [f"{STORE}-{index}" for index in range(len(spec.stores))]


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


class SyntheticWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A synthetic workload of ``requests`` requests. Lengths are in tokens, at least 1.

    ``rate`` is in requests per second. ``arrivals``: ``poisson``; ``constant``; ``gamma`` with the shape
    ``burstiness``, as in ``tercet bench``: below 1 is bursty, 1 is Poisson. The first ``warm_up`` requests are in no
    metric. If ``prefixes`` is not 0, each request starts with one of that number of prefixes of ``prefix`` tokens
    (drawn uniformly), as a part of its input length. ``lengths``: ``normal``; ``lognormal``, which has a long tail, up
    to 20 times the mean (:class:`~tercet_lab.bench.workloads.conversations.Lengths`); ``output_lengths`` are those of
    answers, if they differ.
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
    output_lengths: Literal["normal", "lognormal"] | None = None

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        for field in ("rate", "burstiness"):
            value = getattr(self, field)
            refuse(not value > 0, field, f"is {value}, and must be positive")
        for field in ("input_mean", "output_mean"):
            value = getattr(self, field)
            refuse(not 1 <= value < math.inf, field, f"is {value}, and must be at least 1 token")
        for field in ("input_dev", "output_dev", "warm_up", "prefixes", "prefix"):
            value = getattr(self, field)
            refuse(not 0 <= value < math.inf, field, f"is {value}, and must be a number of at least 0")
        few = self.requests <= self.warm_up
        refuse(few, "requests", f"is {self.requests}, and must exceed warm_up, {self.warm_up}")
        alone = bool(self.prefixes) != bool(self.prefix)
        refuse(alone, "prefixes", "give it together with prefix, their length in tokens")

    def flags(self) -> list[str]:
        """Return the flags of ``tercet sim`` for this workload."""
        differ = self.output_lengths not in (None, self.lengths)
        refuse(differ, "output", "a command line has one kind of lengths for input and output")
        words = load_flags(self, self.rate, self.requests)
        for name in ("input_mean", "input_dev", "output_mean", "output_dev", "lengths", "prefixes", "prefix"):
            value = getattr(self, name)
            words += [f"--{name.replace('_', '-')}", f"{value:.12g}" if isinstance(value, float) else str(value)]
        return words


def load_flags(of: SyntheticWorkload | PlannedWorkload, rate: float | None, requests: int | None) -> list[str]:
    """Return the flags of ``tercet sim`` for the number and the arrivals of requests."""
    words = ["--arrival", of.arrivals] + ([] if rate is None else ["--request-rate", f"{rate:.12g}"])
    words += [] if requests is None else ["--num-prompts", str(requests - of.warm_up)]
    words += ["--num-warmups", str(of.warm_up)] if of.warm_up else []
    return words + (["--burstiness", f"{of.burstiness:.12g}"] if of.arrivals == "gamma" else [])


def requests_of(workload: SyntheticWorkload, seed: int) -> Iterator[tuple[float, Request]]:
    """Yield ``(arrival time in seconds, request)`` in the order of arrival. Equal seeds give equal requests."""
    when, chance = 0.0, random.Random(f"{seed} lengths")
    text = _text(seed) * 2
    prefixes = [_prompt(text, chance, index, workload.prefix) for index in range(workload.prefixes)]
    inputs = lengths(workload.lengths, workload.input_mean, workload.input_dev)
    outputs = lengths(workload.output_lengths or workload.lengths, workload.output_mean, workload.output_dev)
    gaps = gaps_of(workload.arrivals, workload.rate, workload.burstiness, random.Random(f"{seed} arrivals"))
    for number in range(workload.requests):
        when += next(gaps)
        length = inputs.draw(chance)
        prefix = chance.choice(prefixes)[: length - 1] if prefixes else ()
        prompt = prefix + _prompt(text, chance, len(prefixes) + number, length - len(prefix))
        output = outputs.draw(chance)
        yield when, Request(seq_id=f"r{number}", prompt=prompt, sampling_params={"max_tokens": output})


@lru_cache(maxsize=4)
def _text(seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{seed} text").randbytes(_TEXT))


def _prompt(text: tuple[int, ...], chance: random.Random, number: int, length: int) -> tuple[int, ...]:
    start = chance.randrange(_TEXT)
    body = text[start : start + length - 1] if length <= _TEXT else (text * (length // _TEXT + 1))[: length - 1]
    return (_FIRST_UNIQUE_TOKEN + number,) + body  # noqa: RUF005 - one copy instead of two


WORDS = HashedWords()
# Suffix of the names of later turns, one for each turn.
LATER = "+"


def turn_of(name: str) -> int:
    """Return the index of a request's turn in its conversation; 0 is the first."""
    return len(name) - len(name.rstrip(LATER))


class PlannedWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A workload in text form, one text per phase (:func:`tercet_lab.bench.workloads.parse_phase`).

    ``requests`` is their number; None means all of a trace. ``rate`` is in requests per second: after a conversation of
    n requests, the next one begins n gaps later. ``arrivals`` are those of
    :class:`~tercet_lab.bench.simulated.SyntheticWorkload`, or ``trace``: the times of the trace, scaled to the rate
    unless it is None. The first ``warm_up`` conversations are in no metric. ``rows`` are recorded requests instead of a
    text; ``rate`` then scales the times of all of them.
    """

    workload: tuple[str, ...] = ()
    rate: float | None = None
    requests: int | None = None
    arrivals: Literal["poisson", "constant", "gamma", "trace"] = "poisson"
    burstiness: float = 1.0
    warm_up: int = 0
    rows: RecordedRows | None = None

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest`, which names the field, for the first invalid value."""
        trace, rate = self.arrivals == "trace", self.rate
        refuse(self.rows is not None and not trace, "arrivals", "rows have their own times; give rate")
        refuse(not self.finite and trace, "arrivals", "trace needs exactly one workload, a recorded trace")
        refuse(rate is None and not trace, "rate", "is missing; give requests per second")
        refuse(rate is not None and not rate > 0, "rate", "must be positive")
        refuse(not self.burstiness > 0, "burstiness", "must be positive")
        wrong = self.requests is not None and not self.requests > self.warm_up >= 0
        refuse(wrong, "warm_up", "must be 0 or more, and less than requests")

    def flags(self) -> list[str]:
        """Return the flags of ``tercet sim`` for this workload."""
        refuse(self.rows is not None, "work", "a command line has no rows; write them as a trace for --workload")
        texts = [word for text in self.workload for word in ("--workload", text)]
        return texts + load_flags(self, self.rate, self.requests)

    @property
    def finite(self) -> bool:
        """True if the workload is a single recorded trace."""
        return self.rows is not None or is_one_trace(parse_phases(self.workload))


class FollowUp(NamedTuple):
    """A later turn of a conversation. Before ``request`` is sent, a tool runs or a user thinks ``pause`` seconds.

    It is not sent before the second ``due`` of the run.
    """

    pause: float
    request: Request
    is_after_tool: bool
    due: float = 0.0


class PlannedTraffic:
    """The requests of a planned workload, which are made on demand. Equal seeds give equal requests."""

    def __init__(self, workload: PlannedWorkload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        # By the name of a running request: its conversation, the tokens before its answer, and its turn.
        self._open: dict[str, tuple[Conversation, tuple[int, ...], int]] = {}
        self._phases: list[int] = []  # the number of the first request of each phase

    def arrivals(self) -> Iterator[tuple[float, Request]]:
        """Yield ``(arrival time in seconds, first request)`` of each conversation, in the order of arrival."""
        number = 0
        for when, conversation in self._timed():
            while len(self._phases) <= conversation.phase:
                self._phases.append(number)
            yield when, self._request(f"r{number}", conversation, (), 0)
            number += conversation.requests

    @property
    def has_classes(self) -> bool:
        """True if the workload itself gives classes to requests."""
        return self._workload.rows is not None and any(row.klass for row in self._workload.rows.rows)

    def _plan(self) -> Iterator[Conversation]:
        if self._workload.rows is not None:
            return self._workload.rows.conversations(self._workload.rate, self._workload.requests, WORDS, self._seed)
        return plan(parse_phases(self._workload.workload), self._workload.requests, WORDS, self._seed)

    def _timed(self) -> Iterator[tuple[float, Conversation]]:
        given = self._workload
        if given.arrivals == "trace" and given.rate is not None and given.rows is None:
            # Read twice and not stored: the prompts of a trace may have gigabytes.
            offsets = [conversation.offset or 0.0 for conversation in self._plan()]
            yield from zip(replayed(offsets, given.rate), self._plan(), strict=True)
        elif given.arrivals == "trace":
            first: float | None = None
            for conversation in self._plan():  # conversations are in the order of their times
                offset = conversation.offset or 0.0
                first = offset if first is None else first
                yield offset - first, conversation
        else:
            chance = random.Random(f"{self._seed} arrivals")
            gaps = gaps_of(given.arrivals, given.rate or 1.0, given.burstiness, chance)
            when = next(gaps)
            for conversation in self._plan():
                yield when, conversation
                when += sum(itertools.islice(gaps, conversation.requests))

    def _request(self, name: str, conversation: Conversation, said: tuple[int, ...], turn: int) -> Request:
        asked = conversation.turns[turn]
        # The tokens of a trace are equal to a tuple, and are made when a program reads them.
        prompt = (*said, *asked.tokens) if said else cast("tuple[int, ...]", asked.tokens)
        session = name.rstrip(LATER) if len(conversation.turns) > 1 else None
        if turn + 1 < len(conversation.turns):
            self._open[name] = conversation, prompt, turn
        return Request(
            seq_id=name, prompt=prompt, sampling_params={"max_tokens": asked.output_len}, session=session,
            headers={Objectives().header: conversation.klass} if conversation.klass else {},
        )  # fmt: skip

    def after(self, request: Request, output: Sequence[int]) -> FollowUp | None:
        """Return the next turn after the answer to a request, or None at the end of the conversation."""
        found = self._open.pop(request.seq_id, None)
        if found is None:
            return None
        conversation, said, turn = found
        following = self._request(request.seq_id + LATER, conversation, (*said, *output), turn + 1)
        next_turn = conversation.turns[turn + 1]
        return FollowUp(next_turn.think_time, following, next_turn.is_after_tool, next_turn.due or 0.0)

    def phase_of(self, request: Request) -> int:
        """Return the index of the workload's phase that has the request."""
        return bisect_right(self._phases, int(request.seq_id[1:].rstrip(LATER))) - 1

    def unsent(self, request: Request) -> int:
        """Return the number of later requests that are not sent because this request failed."""
        found = self._open.pop(request.seq_id, None)
        return 0 if found is None else len(found[0].turns) - 1 - found[2]


PREDICTED = "x-predicted-tokens"
"""Header of the length that policies of a simulation believe an answer has."""


def with_prediction(request: Request, error: float, seed: int) -> Request:
    """Return the request with a believed length of its answer; ``error`` is that of an experiment's predictions.

    The draw depends on the seed and the request's id only, so that experiments with other errors have the same luck.
    """
    true = request.sampling_params["max_tokens"]
    factor = math.exp(error * random.Random(f"{seed} {request.seq_id} predicted").gauss(0.0, 1.0))
    headers = {**request.headers, PREDICTED: str(max(1, round(true * factor)))}
    return msgspec.structs.replace(request, headers=headers)


def predicted_tokens(request: Request) -> int | None:
    """Return the believed length of a request's answer; None without a prediction."""
    found = request.headers.get(PREDICTED)
    return None if found is None else int(found)


def classed(
    arrivals: Iterable[tuple[float, Request]], weights: Mapping[str, float], header: str, seed: int
) -> Iterator[tuple[float, Request]]:
    """Yield the arrivals, each with a class, drawn by weight, in its ``header``. Equal seeds give equal classes."""
    chance, names, parts = random.Random(f"{seed} classes"), list(weights), list(weights.values())
    for when, request in arrivals:
        name = names[chosen_by_weight(parts, chance.random())]
        headers = request.headers if name == DEFAULT_CLASS else {**request.headers, header: name}
        yield when, msgspec.structs.replace(request, headers=headers)


def slo_of_class(wanted: Objectives | ObjectiveClass) -> Slo:
    """Return the limits of the objectives of all requests, or of a class."""
    return Slo(ttft=wanted.ttft, tpot=wanted.tpot)
