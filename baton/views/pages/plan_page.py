"""One self-contained HTML page about a plan: no script, no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from baton.errors import UserError
from baton.files import write_whole
from baton.planner.compare import Alternative
from baton.planner.describe import seconds
from baton.planner.more import Marginal, PricePoint
from baton.specs.cluster import Cluster
from baton.specs.plan import Plan
from baton.views.terminal.plan import gpu_names, memory, money


def write_plan_page(
    path: Path,
    plan: Plan,
    cluster: Cluster,
    alternatives: Sequence[Alternative],
    marginals: Sequence[Marginal],
    spots: Sequence[PricePoint],
) -> None:
    """Write the page of a plan. Raises UserError where matplotlib is missing or `path` is no place for a file."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UserError(f"--html needs {' and '.join(missing)}, not installed: run `pip install 'baton-rl[plan]'`")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{path} is no place for a page: allowed is a file in a directory that exists")
    write_whole(path, _rendered(plan, cluster, alternatives, marginals, spots).encode("utf-8"))


def _rendered(
    plan: Plan,
    cluster: Cluster,
    alternatives: Sequence[Alternative],
    marginals: Sequence[Marginal],
    spots: Sequence[PricePoint],
) -> str:
    from jinja2 import Environment, StrictUndefined

    from baton.views.pages import plan_charts

    place = files("baton.views.pages")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"seconds": seconds, "memory": memory, "gpus": gpu_names}
    template = environment.from_string((place / "plan.html").read_text(encoding="utf-8"))
    return template.render(
        css=(place / "page.css").read_text(encoding="utf-8"),
        plan=plan,
        tiles=list(_tiles(plan)),
        keys=plan_charts.colours(plan)[1],
        drawing=plan_charts.cluster_drawing(plan, cluster),
        timeline=plan_charts.timeline(plan),
        curve=plan_charts.curve_drawing(spots, plan) if len(spots) > 1 else "",
        more=plan_charts.marginal_drawing(marginals) if marginals else "",
        replicas=_replica_rows(plan),
        alternatives=[
            (
                alternative.name,
                f"{alternative.plan.tokens_per_s:,.0f}" if alternative.plan else "no plan",
                f"{alternative.plan.tokens_per_s / plan.tokens_per_s:.2f} ×" if alternative.plan else "",
                money(alternative.plan.price_per_h, alternative.plan.currency) if alternative.plan else "",
                money(alternative.plan.price_per_million_tokens, alternative.plan.currency)
                if alternative.plan
                else alternative.why_not,
            )
            for alternative in alternatives
        ],
    )


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
    """One row for each shape."""
    rows = []
    for shape in dict.fromkeys((r.gpu, r.tp, r.pp, r.batch) for r in plan.replicas):
        same = [r for r in plan.replicas if (r.gpu, r.tp, r.pp, r.batch) == shape]
        layers = ", ".join(f"{a} to {b - 1}" for a, b in same[0].layers)
        rows.append(
            (
                f"{len(same)} × {shape[0]}",
                f"tp {shape[1]} · pp {shape[2]}",
                layers,
                f"{memory(same[0])} GB",
                f"{same[0].tokens_per_s:,.0f}",
                f"{sum(r.share for r in same):.1%}",
            )
        )
    return rows
