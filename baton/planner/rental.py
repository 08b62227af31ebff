"""Chooses machines to rent: the highest throughput for a budget, or the lowest price for a throughput.

An offer is a machine type with a price. A combination is a number of machines of each offer; these machines form a
cluster. An upper bound on the throughput of each combination assumes that GPUs can be divided into fractions; the
bounds of all combinations are computed at once. For a budget, the search visits combinations in descending order of
their bounds, and ends when a bound is not above the best throughput so far. For a throughput, it visits combinations in
ascending order of their prices, and skips combinations whose bound is below this throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np
from pydantic import Field, model_validator

from baton.clock import time_left
from baton.errors import UserError
from baton.planner.bounds import RolloutBound, serial_bound_s
from baton.planner.instance import make_problem
from baton.planner.problem import AssignmentProblem, Bools, Floats, Inputs, Ints
from baton.planner.reward_stage import plan_with_reward
from baton.planner.what_if import PricePoint
from baton.settings import Settings
from baton.specs.cluster import (
    ClusterSettings,
    GpuSettings,
    LinkSettings,
    MachineSettings,
    NodeSettings,
    find_gpu,
    gpu_types,
)
from baton.specs.plan import Plan

MOST_CHOICES = 200_000
MOST_MACHINES = 2000
"""Maximum number of machines of all offers together. The memory of a cluster grows with the square of this number."""
BOUND_STEPS = 24
"""Number of bisection steps that compute the bound of a combination. More steps would only tighten the bound: it is
valid after any number of steps."""
BOUND_WEIGHTS = 41
"""Number of weights w that `_reaches` tries; fewer than in `division_bound_s`, for speed."""


class OfferSettings(MachineSettings):
    """[[offers]] machines that can be rented."""

    max_nodes: int | None = Field(default=None, ge=1)
    """Maximum number of machines; by default, the budget is the only limit."""


class OffersSettings(Settings):
    """A file of offers for `baton plan --budget` and `--target-throughput`."""

    name: str = "rented"
    """Name of the cluster in plans."""
    links: LinkSettings
    """Bandwidth between rented machines."""
    offers: tuple[OfferSettings, ...] = Field(min_length=1)
    """Machines on offer."""
    gpu: dict[str, GpuSettings] = Field(default_factory=dict)
    """New GPU types, or changes to GPU types of the catalogue, by name."""

    @model_validator(mode="after")
    def _has_known_gpus(self) -> OffersSettings:
        gpus = gpu_types(self.gpu)
        for place, offer in enumerate(self.offers):
            find_gpu(offer.gpu, gpus, f"offers.{place}.gpu")
        offered = sorted({offer.gpu for offer in self.offers})
        for place, link in enumerate(self.links.between):
            if not set(link.ends) <= set(offered):
                raise ValueError(
                    f"links.between.{place}.ends: got {', '.join(link.ends)}, allowed are two of the GPU types of the "
                    f"offers: {', '.join(offered)}"
                )
        return self

    def cluster_settings(self, counts: Sequence[int]) -> ClusterSettings:
        """Return the cluster of these numbers of machines of each offer, without links to GPU types that it lacks. Only
        `build` of the result checks the values."""
        nodes = tuple(
            NodeSettings.model_construct(
                **offer.model_dump(exclude={"max_nodes"}),
                count=count,
                name=f"{offer.gpu.lower()}x{offer.gpus}-{index}",
            )
            for index, (offer, count) in enumerate(zip(self.offers, counts, strict=True))
            if count
        )
        absent = {offer.gpu for offer in self.offers} - {node.gpu for node in nodes}
        between = tuple(each for each in self.links.between if not absent & set(each.ends))
        links = self.links.model_copy(update={"between": between})
        return ClusterSettings.model_construct(name=self.name, links=links, nodes=nodes, gpu=self.gpu)


class RentalChoice(msgspec.Struct, frozen=True):
    """The machines to rent, and their plan."""

    counts: tuple[int, ...]
    """Number of machines of each offer."""
    plan: Plan
    inputs: Inputs
    """The planner's inputs, with the chosen cluster."""
    inputs_of_the_rest: Inputs
    """The inputs without the GPUs of the plan's reward stage."""
    spots: list[PricePoint]
    """Price and throughput of each cluster that was planned during the search."""
    num_choices: int
    num_planned: int
    bound: float
    """For a budget: upper bound on the throughput of every affordable choice. For a target: lower bound on the price of
    every choice that reaches the target."""


class _Market(msgspec.Struct, frozen=True):
    offers: OffersSettings
    problem: AssignmentProblem
    """The planner's problem for a cluster of all offers, from which the bounds are computed."""
    bound: RolloutBound
    """The `RolloutBound` of `problem`."""
    gpus: Floats
    """[offers, pools] number of GPUs of each pool that one machine of an offer has."""


def rent_for_budget(
    inputs: Inputs, offers: OffersSettings, budget: float, *, time_limit_s: float = 120.0
) -> RentalChoice:
    """Return the choice with the highest throughput within a price per hour. `inputs.cluster` is ignored."""
    prices = _prices(offers)
    if budget < prices.min():
        raise UserError(f"--budget: got {budget:g} per hour, but the cheapest machine costs {prices.min():g}")
    most = [
        int(min(offer.max_nodes or np.inf, budget / price + 1e-9))
        for offer, price in zip(offers.offers, prices, strict=True)
    ]
    choices = _choices(most, prices, budget, only_full=True)
    market = _market(inputs, offers, most)
    bounds = _bounds_s(market, choices)
    left_s, best, spots, planned = time_left(time_limit_s), None, list[PricePoint](), 0
    least_s = np.inf
    for place in np.argsort(bounds, kind="stable"):
        if best is not None and bounds[place] >= best[1].breakdown.step_s * (1 - 1e-9):
            break
        if best is not None and left_s() < 0:
            least_s = min(least_s, float(bounds[place]))
            break
        found = _planned(market, choices[place].tolist())
        planned += 1
        if found is not None:
            _, plan, asked, _ = found
            least_s = min(least_s, plan.bound.step_s)
            spots.append(PricePoint(asked.cluster.count(), plan.price_per_h, plan.tokens_per_s))
            if best is None or plan.breakdown.step_s < best[1].breakdown.step_s * (1 - 1e-9):
                best = found
    if best is None:
        raise UserError(f"--budget {budget:g}: no cluster at this price has a feasible plan for {inputs.model.name}")
    top = best[1].tokens_per_step / min(least_s, best[1].breakdown.step_s)
    return RentalChoice(*best, spots, len(choices), planned, top)


def rent_for_target(
    inputs: Inputs, offers: OffersSettings, target: float, *, time_limit_s: float = 120.0
) -> RentalChoice:
    """Return the cheapest choice whose throughput, in trained tokens per second, reaches `target`."""
    prices = _prices(offers)
    without = [offer.gpu for offer in offers.offers if offer.max_nodes is None]
    if without:
        raise UserError(f"offers: max_nodes is missing for {without[0]}; --target-throughput needs it for every offer")
    most = [offer.max_nodes or 1 for offer in offers.offers]
    choices = _choices(most, prices, np.inf, only_full=False)
    costs = choices @ prices
    market = _market(inputs, offers, most)
    can = _reaches(market, choices, inputs.work.trained_tokens / target)
    left_s, spots, planned, open_price, is_late = time_left(time_limit_s), list[PricePoint](), 0, np.inf, False
    for place in np.argsort(costs, kind="stable"):
        if not can[place]:
            continue
        if is_late := left_s() < 0:
            break
        found = _planned(market, choices[place].tolist())
        planned += 1
        if found is None:
            continue
        _, plan, asked, _ = found
        spots.append(PricePoint(asked.cluster.count(), plan.price_per_h, plan.tokens_per_s))
        if plan.tokens_per_s >= target * (1 - 1e-9):
            return RentalChoice(*found, spots, len(choices), planned, min(float(costs[place]), open_price))
        if plan.tokens_per_step / plan.bound.step_s >= target:
            open_price = min(open_price, float(costs[place]))  # a longer search may find a plan that reaches the target
    best = max((spot.tokens_per_s for spot in spots), default=0.0)
    late = "; the search reached its time limit, which --time-limit raises" if is_late else ""
    raise UserError(
        f"--target-throughput {target:g}: no combination of offers reaches this throughput; the best planned "
        f"combination gives {best:,.0f} tokens/s{late}"
    )


def _prices(offers: OffersSettings) -> Floats:
    whole = offers.cluster_settings([1] * len(offers.offers)).build()
    return np.array([node.num_gpus * node.price_per_gpu_h for node in whole.nodes])


def _choices(most: Sequence[int], prices: Floats, budget: float, *, only_full: bool) -> Ints:
    """Return all choices of machines within a budget, as counts [choices, offers]. With `only_full`, return only
    choices to which no machine can be added: no further one is available, or the rest of the budget does not pay for
    it."""
    total = float(np.prod([count + 1.0 for count in most]))
    if total > MOST_CHOICES:
        raise UserError(
            f"offers: got {total:,.0f} combinations of machines, allowed are at most {MOST_CHOICES:,}; set max_nodes"
        )
    if sum(most) > MOST_MACHINES:
        raise UserError(
            f"offers: got up to {sum(most):,} machines, allowed are at most {MOST_MACHINES:,}; set max_nodes"
        )
    rows = np.array(list(product(*(range(count + 1) for count in most))), dtype=np.int64)[1:]
    cost = rows @ prices
    keep = cost <= budget * (1 + 1e-9)
    if only_full:
        for offer, price in enumerate(prices):
            keep &= (rows[:, offer] >= most[offer]) | (cost + price > budget * (1 + 1e-9))
    return rows[keep]


def _market(inputs: Inputs, offers: OffersSettings, most: Sequence[int]) -> _Market:
    whole = inputs.on(offers.cluster_settings(most).build())
    problem = make_problem(whole, "optimistic")
    links = [pool.place.link_bytes_per_s * pool.place.efficiency.publish for pool in problem.pools.pools]
    if inputs.rates is None:  # if the cluster is a single machine, weights are published over the link of this machine
        size = inputs.model.params * inputs.work.weight_bytes
        latency = min(pool.place.efficiency.between_steps_s for pool in problem.pools.pools)
        problem = msgspec.structs.replace(problem, sync_bound_s=min(problem.sync_bound_s, latency + size / max(links)))
    pools = problem.pools.pools
    gpus = np.array([[offer.gpus * (pool.gpu == offer.gpu) for pool in pools] for offer in offers.offers], dtype=float)
    return _Market(offers, problem, RolloutBound(problem), gpus)


def _reaches(market: _Market, choices: Ints, step_s: Floats | float) -> Bools:
    """Return, for each choice of machines, whether a step may take at most `step_s`. This is the test of
    `division_bound_s`, computed for many choices at once."""
    problem, bound, counts = market.problem, market.bound, choices @ market.gpus
    step = problem.step
    if not step.overlaps:
        return serial_bound_s(problem, bound, counts) <= step_s
    left = np.broadcast_to(np.asarray(step_s, dtype=float), (len(choices),)) - problem.sync_bound_s
    rollout_s = left - step.latency_s
    can = (rollout_s >= step.scoring_s) & (left > 0)
    clipped = np.maximum(rollout_s, 0.0)
    for table, gated in bound.tables:
        work = np.stack([np.interp(clipped, bound.times, row) for row in table], axis=1) / bound.tokens
        for weight in np.linspace(0, 1, BOUND_WEIGHTS):
            train, spare = weight * problem.train_rate_bound * left[:, None], (1 - weight) * gated / bound.tokens
            can &= (counts * np.maximum(train, (1 - weight) * work)).sum(axis=1) + spare >= 1
    return can


def _bounds_s(market: _Market, choices: Ints) -> Floats:
    """Return lower bounds on the step time, [choices]."""
    if not market.problem.step.overlaps:
        return serial_bound_s(market.problem, market.bound, choices @ market.gpus)
    low = np.full(len(choices), market.problem.sync_bound_s)
    slowest_s = max(float(market.bound.times[-1]), 1 / float(market.problem.train_rate_bound.min()))
    high = np.full(len(choices), slowest_s * 4 + market.problem.sync_bound_s)
    for _ in range(BOUND_STEPS):
        middle = np.sqrt(np.maximum(low, 1e-9) * high)
        can = _reaches(market, choices, middle)
        low, high = np.where(can, low, middle), np.where(can, middle, high)
    return low


def _planned(market: _Market, counts: Sequence[int]) -> tuple[tuple[int, ...], Plan, Inputs, Inputs] | None:
    """Plan a cluster with these numbers of machines. Return the first fields of its `RentalChoice`, or None if there is
    no plan."""
    asked = market.problem.inputs.on(market.offers.cluster_settings(counts).build())
    try:
        plan, rest = plan_with_reward(asked, time_limit_s=10.0)
    except UserError:
        return None
    return tuple(counts), plan, asked, rest
