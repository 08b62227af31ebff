"""Requests to the planner and their results: plan a cluster, choose machines to rent, or plan a running cluster
again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.planner.colocated import make_colocated_plan
from baton.planner.compare import Alternative, alternatives
from baton.planner.instance import Inputs
from baton.planner.rental import OffersSettings, RentalChoice, rent_for_budget, rent_for_target
from baton.planner.replan import Replanned, replan
from baton.planner.solve import make_plan
from baton.planner.what_if import Marginal, PricePoint, marginals, marked, price_curve
from baton.specs.plan import Method, Plan


class PlanRequest(msgspec.Struct, frozen=True):
    """A request for a plan. By default it asks for a plan of the cluster in `inputs`."""

    inputs: Inputs
    offers: OffersSettings | None = None
    """Machines for rent, which replace the cluster. They require `price_per_h` or `tokens_per_s`."""
    price_per_h: float | None = None
    tokens_per_s: float | None = None
    running: Plan | None = None
    """Running plan to replace. Few GPUs of the running plan get another role in the new plan."""
    slack: float = 0.02
    """Relative increase of the step time that is accepted to move fewer GPUs; used with `running`."""
    is_colocated: bool = False
    method: Method = "exact"
    compares: bool = False
    """Whether to compare with alternatives, and with one more GPU of each type."""
    time_limit_s: float = 60.0


class PlanResult(msgspec.Struct, frozen=True):
    """A plan and, depending on the request, its alternatives, a rental choice or the result of replanning."""

    plan: Plan
    inputs: Inputs
    """Inputs of the plan; for rented machines, with the chosen cluster."""
    alternatives: Sequence[Alternative] = ()
    marginals: Sequence[Marginal] = ()
    spots: Sequence[PricePoint] = ()
    choice: RentalChoice | None = None
    replanned: Replanned | None = None

    def price_curve(self) -> Sequence[PricePoint]:
        """Return price and throughput of the planned cluster and of parts of it."""
        return marked([*self.spots, *price_curve(self.inputs)])

    def public(self) -> dict[str, Any]:
        """Return the JSON of `baton plan --json`; docs/planner.md lists the keys."""
        found: dict[str, Any] = {"plan": msgspec.to_builtins(self.plan)}
        found["plan"]["tokens_per_s"] = self.plan.tokens_per_s
        found["plan"]["price_per_million_tokens"] = self.plan.price_per_million_tokens
        if self.alternatives:
            found["compare"] = [
                {
                    "name": alternative.name,
                    "tokens_per_s": alternative.plan.tokens_per_s if alternative.plan else None,
                    "step_s": alternative.plan.breakdown.step_s if alternative.plan else None,
                    "price_per_h": alternative.plan.price_per_h if alternative.plan else None,
                    "why_not": alternative.why_not,
                }
                for alternative in self.alternatives
            ]
            found["one_more"] = [msgspec.to_builtins(marginal) for marginal in self.marginals]
        if self.choice is not None:
            found["rent"] = {
                "gpus": self.inputs.cluster.count(),
                "machines": list(self.choice.counts),
                "choices": self.choice.num_choices,
                "planned": self.choice.num_planned,
                "bound": self.choice.bound,
            }
        if self.replanned is not None:
            found["replan"] = {
                "chosen": self.replanned.chosen.name,
                "moved": list(self.replanned.chosen.moved),
                "lost": list(self.replanned.lost),
                "added": list(self.replanned.added),
                "options": [
                    {"name": o.name, "moved": len(o.moved), "step_s": o.plan.breakdown.step_s}
                    for o in self.replanned.options
                ],
            }
        return found


def run_request(request: PlanRequest) -> PlanResult:
    """Compute the result of a request. Raises UserError if no plan is feasible."""
    result = _plan(request)
    if not request.compares:
        return result
    return msgspec.structs.replace(
        result,
        marginals=marginals(result.inputs, result.plan.tokens_per_s, time_limit_s=request.time_limit_s / 4),
        alternatives=alternatives(result.inputs, time_limit_s=request.time_limit_s),
    )


def _plan(request: PlanRequest) -> PlanResult:
    inputs, limit_s = request.inputs, request.time_limit_s
    if request.running is not None:
        found = replan(inputs, request.running, slack=request.slack, time_limit_s=limit_s)
        return PlanResult(found.chosen.plan, inputs, replanned=found)
    if request.offers is not None:
        choice = (
            rent_for_budget(inputs, request.offers, request.price_per_h, time_limit_s=limit_s)
            if request.price_per_h is not None
            else rent_for_target(inputs, request.offers, request.tokens_per_s or 0.0, time_limit_s=limit_s)
        )
        return PlanResult(choice.plan, choice.inputs, choice=choice, spots=choice.spots)
    if request.is_colocated:
        return PlanResult(make_colocated_plan(inputs), inputs)
    return PlanResult(make_plan(inputs, request.method, time_limit_s=limit_s), inputs)
