"""What `baton plan` does: reads what a user gives, asks the planner, prints the answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.console import Console, print_json
from baton.cost.efficiency import CalibrationSettings, Efficiencies, RatesSettings
from baton.errors import UserError
from baton.planner.colocated import make_colocated_plan
from baton.planner.compare import Alternative, alternatives
from baton.planner.instance import Inputs
from baton.planner.market import OffersSettings, RentalChoice, rent_for_budget, rent_for_target
from baton.planner.more import Marginal, PricePoint, marginals, marked, price_curve
from baton.planner.replan import Replanned, replan, without_nodes
from baton.planner.solve import make_plan
from baton.recipe.workload import read_cluster, read_settings, read_workload
from baton.specs.cluster import Cluster
from baton.specs.model import read_model
from baton.specs.plan import Method, Plan, read_plan, write_plan
from baton.views.pages.plan_page import write_plan_page
from baton.views.terminal.plan import print_answer


class PlanRequest(msgspec.Struct, frozen=True):
    """What was asked on the command line; each field is the option of its name."""

    model: Path
    workload: Path
    cluster: Path | None = None
    offers: Path | None = None
    budget: float | None = None
    target_throughput: float | None = None
    compare: bool = False
    colocated: bool = False
    method: Method = "exact"
    symmetric_only: bool = False
    rates: Path | None = None
    calibration: Path | None = None
    running: Path | None = None
    """--from"""
    lost: str | None = None
    slack: float = 0.02
    time_limit: float = 60.0
    write_to: Path | None = None
    """--out"""
    html: Path | None = None
    as_json: bool = False


class PlanResult(msgspec.Struct, frozen=True):
    """All that one call found out."""

    plan: Plan
    inputs: Inputs
    alternatives: Sequence[Alternative] = ()
    marginals: Sequence[Marginal] = ()
    spots: Sequence[PricePoint] = ()
    choice: RentalChoice | None = None
    replanned: Replanned | None = None


def run(question: PlanRequest, out: Console) -> None:
    """Answer a question and print or write the answer. Raises UserError."""
    answer = ask(question)
    if question.write_to is not None:
        write_plan(answer.plan, question.write_to)
    if question.html is not None:
        curve = marked([*answer.spots, *price_curve(answer.inputs)])
        write_plan_page(question.html, answer.plan, answer.inputs.cluster, answer.alternatives, answer.marginals, curve)
    if question.as_json:
        print_json(_public(answer))
        return
    print_answer(out, answer.plan, answer.alternatives, answer.marginals, answer.choice, answer.replanned)
    for path in (question.write_to, question.html):
        if path is not None:
            out.print(f"written: {path}", soft_wrap=True)


def ask(question: PlanRequest) -> PlanResult:
    """Decide which question was asked, and answer it."""
    _check(question)
    inputs = _inputs(question)
    answer = _answer(question, inputs)
    if question.compare or question.html is not None:
        more = marginals(answer.inputs, answer.plan.tokens_per_s, time_limit_s=question.time_limit / 4)
        others = alternatives(answer.inputs, time_limit_s=question.time_limit)
        answer = msgspec.structs.replace(answer, alternatives=others, marginals=more)
    return answer


def _check(question: PlanRequest) -> None:
    budget, target = question.budget, question.target_throughput
    for key, value in (("--budget", budget), ("--target-throughput", target)):
        if value is not None and not value > 0:
            raise UserError(f"{key}: got {value:g}, allowed are positive numbers")
    if budget is not None and target is not None:
        raise UserError("--budget and --target-throughput exclude each other: fix the price or the throughput")
    renting = budget is not None or target is not None
    if renting != (question.offers is not None):
        raise UserError("--offers goes with --budget or --target-throughput: what can be rented, and what is wanted")
    if renting == (question.cluster is not None):
        raise UserError("give --cluster (the GPUs there are), or --offers with --budget or --target-throughput")
    if question.running is not None and (renting or question.colocated):
        raise UserError("--from plans anew for a cluster: give --cluster alone with it")
    if renting and (question.colocated or question.method != "exact"):
        raise UserError("--colocated and --method are about a --cluster: plan what was rented with them afterwards")
    if question.rates is not None and question.calibration is not None:
        raise UserError("--rates and --calibration exclude each other: measured rates replace the cost model")
    if question.lost is not None and question.cluster is None:
        raise UserError("--lost names machines of a cluster: give --cluster")


def _inputs(question: PlanRequest) -> Inputs:
    of = read_cluster(question.cluster) if question.cluster is not None else Cluster("none", (), ())
    if question.lost is not None:
        of = without_nodes(of, [name.strip() for name in question.lost.split(",") if name.strip()])
    calibration, rates = question.calibration, question.rates
    return Inputs(
        cluster=of,
        model=read_model(question.model),
        work=read_workload(question.workload),
        efficiencies=read_settings(CalibrationSettings, calibration).build()
        if calibration is not None
        else Efficiencies(),
        rates=read_settings(RatesSettings, rates) if rates is not None else None,
        cross_types=not question.symmetric_only,
    )


def _answer(question: PlanRequest, inputs: Inputs) -> PlanResult:
    limit_s = question.time_limit
    if question.running is not None:
        found = replan(inputs, read_plan(question.running), slack=question.slack, time_limit_s=limit_s)
        return PlanResult(found.chosen.plan, inputs, replanned=found)
    if question.offers is not None:
        offers = read_settings(OffersSettings, question.offers)
        choice = (
            rent_for_budget(inputs, offers, question.budget, time_limit_s=limit_s)
            if question.budget is not None
            else rent_for_target(inputs, offers, question.target_throughput or 0.0, time_limit_s=limit_s)
        )
        return PlanResult(choice.plan, choice.inputs, choice=choice, spots=choice.spots)
    if question.colocated:
        return PlanResult(make_colocated_plan(inputs), inputs)
    return PlanResult(make_plan(inputs, question.method, time_limit_s=limit_s), inputs)


def _public(answer: PlanResult) -> dict[str, Any]:
    """What --json prints; docs/planner.md lists the keys."""
    found: dict[str, Any] = {"plan": msgspec.to_builtins(answer.plan)}
    found["plan"]["tokens_per_s"] = answer.plan.tokens_per_s
    found["plan"]["price_per_million_tokens"] = answer.plan.price_per_million_tokens
    if answer.alternatives:
        found["compare"] = [
            {
                "name": alternative.name,
                "tokens_per_s": alternative.plan.tokens_per_s if alternative.plan else None,
                "step_s": alternative.plan.breakdown.step_s if alternative.plan else None,
                "price_per_h": alternative.plan.price_per_h if alternative.plan else None,
                "why_not": alternative.why_not,
            }
            for alternative in answer.alternatives
        ]
        found["one_more"] = [msgspec.to_builtins(marginal) for marginal in answer.marginals]
    if answer.choice is not None:
        choice = answer.choice
        found["rent"] = {
            "gpus": answer.inputs.cluster.count(),
            "machines": list(choice.counts),
            "choices": choice.num_choices,
            "planned": choice.num_planned,
            "bound": choice.bound,
        }
    if answer.replanned is not None:
        found["replan"] = {
            "chosen": answer.replanned.chosen.name,
            "moved": list(answer.replanned.chosen.moved),
            "lost": list(answer.replanned.lost),
            "added": list(answer.replanned.added),
            "options": [
                {"name": o.name, "moved": len(o.moved), "step_s": o.plan.breakdown.step_s}
                for o in answer.replanned.options
            ],
        }
    return found
