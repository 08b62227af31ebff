"""The result of a request to the planner: plan a cluster, choose machines to rent, or plan a running cluster again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.planner.certainty import Certainty
from baton.planner.compare import Alternative
from baton.planner.problem import Inputs
from baton.planner.rental import RentalChoice
from baton.planner.replan import Replanned
from baton.planner.what_if import Marginal, PricePoint, marked, price_curve
from baton.specs.cluster import Cluster
from baton.specs.plan import Plan


class PlanResult(msgspec.Struct, frozen=True):
    """A plan and, depending on the request, its alternatives, a rental choice or the result of replanning."""

    plan: Plan
    cluster: Cluster
    """The planned cluster, with the GPUs of the reward stage. If machines are rented, the chosen machines."""
    inputs: Inputs
    """Inputs of the plan. Their cluster lacks the GPUs of the reward stage."""
    alternatives: Sequence[Alternative] = ()
    marginals: Sequence[Marginal] = ()
    choice: RentalChoice | None = None
    replanned: Replanned | None = None
    measured: tuple[str, ...] = ()
    """Measured rates of the run with the current plan, one line of text each. The new plan uses these rates."""
    certainty: Certainty | None = None
    """How certain the plan is. None for plans with a table of rates, with `method = "paper"`, and for colocated
    plans."""

    def price_curve(self) -> Sequence[PricePoint]:
        """Return price and throughput of the planned cluster, of parts of it, and of clusters that a rental search has
        planned."""
        rented = self.choice.spots if self.choice is not None else []
        return marked([*rented, *price_curve(self.inputs, reward_per_h=self.reward_per_h)])

    @property
    def reward_per_h(self) -> float:
        return self.plan.price_per_h - self.inputs.cluster.price_per_h

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
        if self.certainty is not None:
            found["certainty"] = msgspec.to_builtins(self.certainty)
        if self.choice is not None:
            found["rent"] = {
                "gpus": self.choice.inputs.cluster.count(),
                "machines": list(self.choice.counts),
                "choices": self.choice.num_choices,
                "planned": self.choice.num_planned,
                "bound": self.choice.bound,
            }
        if self.replanned is not None:
            found["replan"] = {
                "chosen": self.replanned.chosen.name,
                "measured": list(self.measured),
                "moved": list(self.replanned.chosen.moved),
                "lost": list(self.replanned.lost),
                "added": list(self.replanned.added),
                "options": [
                    {"name": o.name, "moved": len(o.moved), "step_s": o.plan.breakdown.step_s}
                    for o in self.replanned.options
                ],
            }
        return found
