"""Write the page of a plan: self-contained HTML without scripts or network access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.files import write_whole
from baton.planner.plan_from_solution import seconds
from baton.planner.result import PlanResult
from baton.planner.what_if import PricePoint
from baton.specs.plan import Plan
from baton.views.pages.template import render_template
from baton.views.terminal.plan import gpu_names, memory, money, plan_cells, replicas_by_shape, training_shape


def write_plan_page(path: Path, result: PlanResult, curve: Sequence[PricePoint]) -> None:
    """Write the page of a plan to a path that has passed `check_page`. `curve`: points of throughput by price."""
    from baton.views.pages import plan_charts

    plan, marginals = result.plan, result.marginals
    page = render_template(
        "plan.html",
        {"seconds": seconds, "memory": memory, "gpus": gpu_names},
        plan=plan,
        shape=training_shape,
        tiles=list(_tiles(plan)),
        keys=plan_charts.colours(plan)[1],
        drawing=plan_charts.cluster_drawing(plan, result.cluster),
        timeline=plan_charts.timeline(plan),
        curve=plan_charts.curve_drawing(curve, plan) if len(curve) > 1 else "",
        more=plan_charts.marginal_drawing(marginals) if marginals else "",
        replicas=_replica_rows(plan),
        alternatives=[
            (each.name, *plan_cells(each.plan, plan)) if each.plan else (each.name, "no plan", "", "", each.why_not)
            for each in result.alternatives
        ],
    )
    write_whole(path, page.encode())


def _tiles(plan: Plan) -> Iterator[tuple[str, str, str]]:
    b = plan.breakdown
    yield "Throughput", f"{plan.tokens_per_s:,.0f}", "trained tokens per second"
    yield "Train step", seconds(b.step_s), f"sync {seconds(b.sync_s)}, rollout {seconds(b.rollout_s)}"
    yield "Price", money(plan.price_per_h, plan.currency), "per hour, all GPUs"
    yield "Price of tokens", money(plan.price_per_million_tokens, plan.currency), "per million trained tokens"
    yield "Staleness", f"≤ {plan.max_staleness}", f"about {plan.mean_staleness:.1f} on average"
    gap = "optimum" if plan.bound.is_proven else f"≤ {plan.bound.gap:.2%}"
    yield "Gap", gap, "proven" if plan.bound.is_proven else "above the best possible step"


def _replica_rows(plan: Plan) -> list[tuple[str, str, str, str, str, str]]:
    """Return one row per replica shape: (replicas, shape, layers, memory, tokens/s of a replica, share of the work)."""
    return [
        (
            f"{len(same)} × {same[0].gpu}",
            f"tp {same[0].tp} · pp {same[0].pp}",
            ", ".join(f"{a} to {b - 1}" for a, b in same[0].layers),
            f"{memory(same[0])} GB",
            f"{same[0].tokens_per_s:,.0f}",
            f"{sum(r.share for r in same):.1%}",
        )
        for same in replicas_by_shape(plan)
    ]
