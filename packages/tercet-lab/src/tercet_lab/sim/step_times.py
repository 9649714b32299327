"""The step-time profiles: an engine's properties, the times of its forward passes, and the speed of its KV transfers.

A profile is a JSON file with the source of its numbers. The step model has five terms, all in seconds. A step that
computes ``P`` prompt tokens and decodes ``B`` sequences takes

``linear(P + B) + pair * pairs + context * contexts + sequence * B + step``

where ``linear`` interpolates a table over tokens (matrix products, norms, all-reduce: for few tokens bound by reading
weights, after the last knot proportional), ``pairs`` is the number of (query, key) pairs of prefill attention, and
``contexts`` is the number of KV tokens that all decodes of the step read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from importlib import resources
from pathlib import Path

import msgspec

from tercet.aio.files import read_named
from tercet.protocol import BadRequest, KVLayout


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a model's KV. ``kv_dtype_bytes`` is the size of one element of a key or value."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    kv_dtype: str
    kv_dtype_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV for one token, in all layers, over all ranks."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_dtype_bytes


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The terms of the step model, in seconds. ``knots`` are pairs ``(tokens, seconds)`` in rising order."""

    knots: tuple[tuple[int, float], ...]
    pair: float
    context: float
    sequence: float = 0.0
    step: float = 0.0


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The speed of KV transfers: bytes per second in each direction, and seconds from the last byte to the answer."""

    bytes_per_second: float
    latency: float


class HostSharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The factors by which a step takes longer while another engine of the same machine is busy.

    A step with prompt tokens is a prefill. ``prefill_beside_decode`` is the factor of a prefill while the other engine
    decodes. An engine that becomes idle lingers for ``linger`` seconds before it sleeps: for that time, vLLM's
    processes poll without a pause.
    """

    prefill_beside_prefill: float
    prefill_beside_decode: float
    decode_beside_prefill: float
    decode_beside_decode: float
    prefill_beside_linger: float = 1.0
    decode_beside_linger: float = 1.0
    linger: float = 0.0


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The source of a profile's numbers. ``fit_error`` is the fit's mean absolute relative error by kind of step."""

    source: str
    date: str
    command: str = ""
    fit_error: dict[str, float] = {}
    note: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The profile of one engine: a model on a device.

    ``call`` is the time from a verb's call to its arrival in the engine, ``router`` the time that a router adds to a
    request, both in seconds. ``sharing`` has the factors for engines that share a machine; None: not measured.
    """

    name: str
    model: ModelShape
    device: str
    tp_size: int
    block_size: int
    total_blocks: int
    max_model_len: int
    steps: StepTimes
    transfer: Transfer
    provenance: Provenance
    call: float = 0.0
    router: float = 0.0
    sharing: HostSharing | None = None

    def layout(self) -> KVLayout:
        """Return the KV layout. Engines exchange KV only if their layouts allow it."""
        model = self.model
        heads_per_rank = max(1, model.kv_heads // self.tp_size)
        return KVLayout(
            model=model.name,
            dtype=model.kv_dtype,
            num_layers=model.layers,
            num_kv_heads=model.kv_heads,
            head_size=model.head_size,
            block_size=self.block_size,
            block_bytes=2 * self.block_size * heads_per_rank * model.head_size * model.kv_dtype_bytes,
            tp_size=self.tp_size,
            packing="simulated",
            splits_by_head=True,
        )


class StepModel:
    """The step times of a profile, prepared for frequent use.

    ``decode_scale`` multiplies the decode part of a step: its time without its prompt tokens. ``prefill_scale``
    multiplies the rest.
    """

    def __init__(self, times: StepTimes, prefill_scale: float = 1.0, decode_scale: float = 1.0) -> None:
        self._times = times
        self._prefill_scale = prefill_scale
        self._decode_scale = decode_scale
        self._tokens = [tokens for tokens, _ in times.knots]
        self._decode_base: dict[int, float] = {}
        self.per_context = times.context * decode_scale

    def linear(self, tokens: int) -> float:
        """Return the seconds of the parts that depend only on the number of tokens."""
        knots = self._times.knots
        if tokens <= 0:
            return 0.0
        if tokens <= knots[0][0]:
            return knots[0][1]
        index = min(bisect_right(self._tokens, tokens), len(knots) - 1)
        (low, at_low), (high, at_high) = knots[index - 1], knots[index]
        return at_low + (tokens - low) * (at_high - at_low) / (high - low)

    def decode_base(self, batch: int) -> float:
        """Return the seconds of a step that decodes ``batch`` sequences, without ``per_context`` for each KV token."""
        found = self._decode_base.get(batch)
        if found is None:
            times = self._times
            found = (self.linear(batch) + times.sequence * batch + times.step) * self._decode_scale if batch else 0.0
            self._decode_base[batch] = found
        return found

    def step(self, tokens: int, pairs: float, batch: int, contexts: int) -> float:
        """Return the seconds of a step.

        It computes ``tokens`` prompt tokens with ``pairs`` pairs of attention, and decodes ``batch`` sequences with
        ``contexts`` KV tokens in total.
        """
        decode = self.decode_base(batch) + self.per_context * contexts if batch else 0.0
        if not tokens:
            return decode
        times = self._times
        together = self.linear(tokens + batch) + times.sequence * batch + times.step
        without = self.decode_base(batch) / self._decode_scale if batch else 0.0
        return decode + (max(0.0, together - without) + times.pair * pairs) * self._prefill_scale


def pairs_of(begin: int, end: int) -> float:
    """Return the number of (query, key) pairs of causal attention for the positions ``[begin, end)``."""
    return (end - begin) * (begin + end + 1) / 2


def load_profile(name: str) -> Profile:
    """Return the shipped profile of this name, or the profile of a JSON file (a name that ends in ``.json``).

    Raise :class:`~tercet.protocol.BadRequest` if it does not exist or is invalid.
    """
    file = Path(name).expanduser()
    if name.endswith(".json"):
        try:
            content = read_named(file)
        except FileNotFoundError as error:
            raise BadRequest(f"profile: file {name} does not exist", "profile") from error
        except OSError as error:
            raise BadRequest(f"profile: {name} cannot be read: {error.strerror}", "profile") from error
        return parse_profile(content, name)
    shipped = shipped_profiles()
    if name not in shipped:
        raise BadRequest(f"profile: {name!r} does not exist; choose {', '.join(shipped)}, or a .json file", "profile")
    return parse_profile((_FOLDER / f"{name}.json").read_bytes(), name)


_FOLDER = resources.files("tercet_lab.sim") / "profiles"


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that Tercet ships."""
    return sorted(item.name.removesuffix(".json") for item in _FOLDER.iterdir() if item.name.endswith(".json"))


def parse_profile(data: bytes, name: str) -> Profile:
    """Return the checked profile from JSON. Raise :class:`~tercet.protocol.BadRequest`, which contains ``name``."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"profile: {name}: {error}", "profile") from error
    wrong = _first_wrong(profile)
    if wrong:
        raise BadRequest(f"profile: {name}: {wrong}", "profile")
    return profile


def _first_wrong(profile: Profile) -> str | None:
    for field in ("tp_size", "block_size", "total_blocks", "max_model_len"):
        if getattr(profile, field) < 1:
            return f"{field} is {getattr(profile, field)}, and must be at least 1"
    steps = profile.steps
    for field in ("pair", "context", "sequence", "step"):
        if not getattr(steps, field) >= 0:
            return f"steps.{field} is {getattr(steps, field)}, and must not be negative"
    if len(steps.knots) < 2:
        return "steps.knots needs at least two points"
    rising = zip(steps.knots, steps.knots[1:], strict=False)
    if steps.knots[0][0] < 1 or steps.knots[0][1] <= 0 or any(a[0] >= b[0] or a[1] > b[1] for a, b in rising):
        return "steps.knots must rise in tokens, start at 1 or more, and never fall in seconds"
    if profile.transfer.bytes_per_second <= 0 or profile.transfer.latency < 0:
        return "transfer.bytes_per_second must be positive, transfer.latency not negative"
    if not (profile.call >= 0 and profile.router >= 0):
        return "call and router must not be negative"
    for field, factor in msgspec.structs.asdict(profile.sharing).items() if profile.sharing else ():
        least = 0 if field == "linger" else 1
        if not least <= factor < math.inf:
            return f"sharing.{field} is {factor}, and must be at least {least}"
    return None
