"""Which route is cheapest: one engine alone, or a pair and where the prompt is split between them. Pure.

For a request of ``n`` tokens with ``L`` expected of the answer, on engine ``e`` alone:

    ttft = waiting(e) + prefill(e)
    tpot = step(e, batch + 1) / (1 - interference(e))
    cost = ttft + L tpot                              until its own last token
         + (prefill(e) - step(e)) batch(e)            by which the decodes that run there end later
         + prefill(e) arrivals(e)                     and the prefills that will come behind it
         + (step(batch + 1) - step(batch)) tokens     and, by the larger batch, the decodes again

A pair ``p, d`` with a split at ``s`` pays for ``prompt[:s]`` on ``p``, for the transfer, and for the rest and the
decode on ``d``. With objectives, what misses them least goes first, and the cost decides among equals.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tercet.fleet.cost import CostModel
from tercet.fleet.cost_notes import RouteOption, Targets
from tercet.fleet.cost_work import EngineWork

SPLITS = (0.9, 0.75, 0.5)
PAIRED, SPLIT = 3, 2
SHARPER = 3
STEPS_TO_RESERVE, STEPS_TO_JOIN = 0.5, 0.5
"""Engines take calls between steps: a call waits half a step on average, where decodes run."""


@dataclass(frozen=True)
class Wanted:
    """The request: ``tokens`` of prompt, and how many are expected of the answer."""

    tokens: int
    output: float
    targets: Targets


class Site:
    """One engine at the moment of a decision; ``matched`` tokens of the prompt are believed to be cached there."""

    def __init__(self, name: str, work: EngineWork, model: CostModel, now: float, matched: int) -> None:
        self.name = name
        self.matched = matched
        self.waiting = work.waiting(now)
        self.under_way = work.under_way(now)
        self.interference = work.interference(now)
        self.batch = work.decoding + work.coming
        self.contexts = work.contexts
        self.seconds_left = work.seconds_left(now)
        self.work, self.model, self.now = work, model, now

    def prefill(self, begin: int, end: int, sent: int = 0) -> float:
        """Seconds to compute ``prompt[begin:end)`` here, less what is cached, and to send ``sent`` tokens of it."""
        cached = max(begin, min(self.matched, end - 1))
        return self.model.prefill(end - cached, cached, self.batch, sent) * self.work.prefill_pace.factor

    def delay(self, seconds: float) -> float:
        """By how much others end later, in sum, when a prefill takes ``seconds`` here.

        The steps that run it give each decode a token too.
        """
        behind = self.interference * (self.waiting + seconds)
        step = self.model.step(self.batch, self.contexts) * self.work.decode_pace.factor if self.batch else 0.0
        return self.work.stall(self.now, max(0.0, seconds - step)) + behind

    def decode(self, context: int, output: float) -> tuple[float, float]:
        """Seconds per token of one more decode, and by how much it makes the others end later."""
        contexts = self.contexts + context
        tpot = self.work.pace_of_tokens(self.interference, self.batch + 1, contexts)
        if not self.batch:
            return tpot, 0.0
        slower = tpot - self.work.pace_of_tokens(self.interference, self.batch, self.contexts)
        together = min(self.seconds_left / tpot, output) if self.seconds_left else output
        return tpot, slower * self.batch * together


def options_of(sites: Sequence[Site], wanted: Wanted) -> list[RouteOption]:
    """The routes over these engines that are worth a look, the best first.

    Every engine alone; pairs of the few that prefill at the least cost and the few that decode at the least cost; and
    for the best of these pairs, other splits.
    """
    _expect_order(sites)
    alone = [_alone(site, wanted) for site in sites]
    by_name = {site.name: site for site in sites}
    prefills = heapq.nsmallest(PAIRED, sites, key=lambda site: _cost_of_prefill(site, wanted))
    decodes = heapq.nsmallest(PAIRED, sites, key=lambda site: _cost_of_decode(site, wanted))
    pairs = [
        _pair(prefill, decode, wanted.tokens, wanted)
        for prefill in prefills
        for decode in decodes
        if prefill is not decode and wanted.tokens > decode.matched
    ]
    splits = [
        _pair(by_name[pair.prefill], by_name[pair.decode], split, wanted)
        for pair in heapq.nsmallest(SPLIT, pairs, key=_rank)
        for split in _splits(by_name[pair.decode], wanted)
    ]
    return sorted((*alone, *pairs, *splits), key=_rank)


def _rank(option: RouteOption) -> tuple[float, float]:
    return option.missed, option.cost


def _cost_of_prefill(site: Site, wanted: Wanted) -> float:
    seconds = site.prefill(0, wanted.tokens)
    return site.waiting + seconds + site.delay(seconds)


def _cost_of_decode(site: Site, wanted: Wanted) -> float:
    tpot, slowed = site.decode(wanted.tokens, wanted.output)
    return wanted.output * tpot + slowed - site.matched * site.prefill(0, wanted.tokens) / wanted.tokens


def _expect_order(sites: Sequence[Site]) -> None:
    """Expect of the engines' future that they differ more than in the recent past.

    Prefills go where few decodes run, and decodes where few prefills do, so engines that differ by chance are drawn
    apart. Predictions that take the past for the future would miss that, and leave all engines alike.
    """
    total = sum(site.interference for site in sites)
    sharper = sum(site.interference**SHARPER for site in sites)
    for site in sites:
        site.interference = total * site.interference**SHARPER / sharper if sharper else 0.0


def _alone(site: Site, wanted: Wanted) -> RouteOption:
    seconds = site.prefill(0, wanted.tokens)
    tpot, slowed = site.decode(wanted.tokens, wanted.output)
    ttft = site.waiting + seconds
    return _option(wanted, site.name, ttft, tpot, site.delay(seconds) + slowed)


def _pair(prefill: Site, decode: Site, split: int, wanted: Wanted) -> RouteOption:
    tpot, slowed = decode.decode(wanted.tokens, wanted.output)
    step = tpot if decode.batch else 0.0
    ready = max(decode.under_way, STEPS_TO_RESERVE * step) + prefill.waiting
    first = prefill.prefill(0, split, split - min(decode.matched, split))
    ready += first
    # What still waits on the decode engine when the KV is there delays the rest of the prompt, or the decode.
    still = max(0.0, decode.waiting - ready, STEPS_TO_JOIN * step)
    others = prefill.delay(first) + slowed
    if split == wanted.tokens:
        return _option(wanted, decode.name, ready, tpot, others + still, prefill.name, split)
    rest = decode.prefill(split, wanted.tokens)
    return _option(
        wanted, decode.name, ready + still + rest, tpot, others + decode.delay(rest), prefill.name, split
    )  # fmt: skip


def _option(
    wanted: Wanted, decode: str, ttft: float, tpot: float, others: float, prefill: str = "", split: int = 0
) -> RouteOption:
    own = ttft + (wanted.output - 1) * tpot
    missed = wanted.targets.missed_by(ttft, tpot)
    return RouteOption(decode, ttft, tpot, own + others, prefill, split, missed)


def _splits(decode: Site, wanted: Wanted) -> Iterator[int]:
    """Where a pair may split: past what the decode engine has, each place once."""
    places: Iterable[int] = dict.fromkeys(max(1, round(wanted.tokens * share)) for share in SPLITS)
    return (place for place in places if decode.matched < place < wanted.tokens)
