"""Print a plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from baton.console import Console
from baton.planner.certainty import Certainty
from baton.planner.compare import Alternative
from baton.planner.plan_from_solution import seconds
from baton.planner.rental import RentalChoice
from baton.planner.replan import Replanned
from baton.planner.result import PlanResult
from baton.specs.plan import Plan, Replica, RewardStage, Stage


def print_plan(console: Console, result: PlanResult) -> None:
    """Print a plan, what limits it, its alternatives, and the effect of one more GPU of each type."""
    plan = result.plan
    if result.choice is not None:
        _say_choice(console, plan, result.choice)
    if result.replanned is not None:
        for line in result.measured:
            console.print(line)
        _say_replanned(console, result.replanned)
    shape = ", trainer and engines colocated" if plan.is_colocated else ""
    console.print(f"{plan.model} · {plan.workload} · {plan.cluster} ({plan.method}{shape})", style="italic")
    console.print(_roles(plan))
    if (stage := plan.reward) is not None:
        console.print(
            f"reward model {stage.model} on {len(stage.gpu_ids)} {stage.gpu} ({gpu_names(stage.gpu_ids)}): "
            f"{len(stage.gpu_ids) / stage.trajectory_s:,.1f} trajectories/s, memory {memory(stage)} GB"
        )
    for idle in plan.idle:
        console.print(f"idle: {len(idle.gpu_ids)} GPUs ({gpu_names(idle.gpu_ids)}): {idle.why}")
    console.print(f"training on {gpu_names(plan.training.gpu_ids)}")
    b = plan.breakdown
    together = "max(rollout + reward, train)" if b.overlaps else "rollout + reward + train"
    console.print(
        f"step {seconds(b.step_s)} = sync {seconds(b.sync_s)} + {together}: rollout {seconds(b.rollout_s)}, "
        f"reward {seconds(b.reward_s)}, train {seconds(b.train_s)}"
    )
    console.print(
        f"throughput {plan.tokens_per_s:,.0f} trained tokens/s · {money(plan.price_per_h, plan.currency)} per hour · "
        f"{money(plan.price_per_million_tokens, plan.currency)} per million trained tokens"
    )
    if result.certainty is not None:
        _say_certainty(console, result.certainty)
    console.print(f"staleness: at most {plan.max_staleness} versions, about {plan.mean_staleness:.1f} on average")
    proof = "proven optimum" if plan.bound.is_proven else f"at most {plan.bound.gap:.2%} above the best possible step"
    console.print(f"{proof}{' (' + plan.bound.note + ')' if plan.bound.note else ''}")
    for sentence in plan.limits:
        console.print(f"limit: {sentence}")
    if result.alternatives:
        console.print(_rivals(plan, result.alternatives))
        for alternative in result.alternatives:
            if alternative.plan is None:
                console.print(f"{alternative.name}: {alternative.why_not}")
    for marginal in result.marginals:
        price = money(marginal.price_per_h, plan.currency)
        console.print(f"one more {marginal.gpu} ({price} per hour) would change throughput by {marginal.gain:+.2%}")


def _say_certainty(console: Console, of: Certainty) -> None:
    worst, value, best = of.tokens_per_s
    console.print(
        f"this plan over the calibration's ranges: {worst:,.0f} to {best:,.0f} trained tokens/s, {value:,.0f} expected"
    )
    if (change := of.change) is None:
        some = "" if of.tried == of.num_parameters else f" of the {of.tried} that the time limit allowed"
        text = f"within its range, no single parameter{some} changes which GPU types train ({', '.join(of.trains)})"
    else:
        text = (
            f"which GPUs train depends on {change.parameter}: {change.value} ({change.origin}); at {change.at}, "
            f"{' and '.join(change.trains)} train"
        )
    console.print(text)


def _say_choice(console: Console, plan: Plan, choice: RentalChoice) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in choice.inputs.cluster.count().items())
    console.print(
        f"rent {counts} for {money(plan.price_per_h, plan.currency)} per hour "
        f"({choice.num_choices} choices, {choice.num_planned} of them planned, the others excluded by their bounds)",
        style="bold",
    )


def _say_replanned(console: Console, replanned: Replanned) -> None:
    console.print(
        f"{len(replanned.lost)} GPUs lost, {len(replanned.added)} added; {replanned.chosen.name}: "
        f"{len(replanned.chosen.moved)} GPUs move",
        style="bold",
    )
    for option in replanned.options:
        console.print(f"  {option.name}: step {seconds(option.plan.breakdown.step_s)}, {len(option.moved)} move")


def _roles(plan: Plan) -> Table:
    table = Table("role", "GPUs", "shape", "layers", "GB of a GPU", "share", box=SIMPLE_HEAD)
    for stage in plan.training.stages:
        layers = f"{stage.layers[0]}-{stage.layers[1] - 1}"
        gpus = f"{len(stage.gpu_ids)} {stage.gpu}"
        table.add_row("train", gpus, training_shape(plan, stage), layers, memory(stage), "")
    for same in replicas_by_shape(plan):
        r = same[0]
        shape = f"{len(same)} × tp {r.tp} · pp {r.pp}, batch {r.batch}"
        share = f"{sum(each.share for each in same):.1%}"
        table.add_row("rollout", f"{len(same) * r.tp * r.pp} {r.gpu}", shape, "all", memory(r), share)
    return table


def training_shape(plan: Plan, stage: Stage) -> str:
    """Return the parallel shape of a trainer stage, or of the part of a mixed stage on one GPU type, as text."""
    training = plan.training
    if not training.is_mixed:
        return f"dp {stage.dp} · tp {stage.tp}"
    ranks = sum(part.dp for part in training.stages)
    return f"{stage.dp} of dp {ranks}, {training.row_share(stage):.0%} of the rows"


def _rivals(plan: Plan, alternatives: Sequence[Alternative]) -> Table:
    numbers = (Column(name, justify="right") for name in ("tokens/s", "ratio", "per hour", "per M tokens"))
    table = Table("compared with", *numbers, box=SIMPLE_HEAD)
    for name, other in (("this plan", plan), *((each.name, each.plan) for each in alternatives)):
        if other is not None:
            table.add_row(name, *plan_cells(other, plan))
    return table


def plan_cells(plan: Plan, reference: Plan) -> tuple[str, str, str, str]:
    """Return four cells of a table: the plan's throughput, the ratio of this throughput to that of `reference`, the
    price per hour, and the price per million trained tokens."""
    return (
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.tokens_per_s / reference.tokens_per_s:.2f} ×",
        money(plan.price_per_h, plan.currency),
        money(plan.price_per_million_tokens, plan.currency),
    )


def replicas_by_shape(plan: Plan) -> list[list[Replica]]:
    """Return the replicas in groups of equal GPU type, parallel shape and batch."""
    groups: dict[tuple[str, int, int, int], list[Replica]] = {}
    for replica in plan.replicas:
        groups.setdefault((replica.gpu, replica.tp, replica.pp, replica.batch), []).append(replica)
    return list(groups.values())


def memory(part: Stage | Replica | RewardStage) -> str:
    """Return the needed and the available memory per GPU in GB, or `as measured` for a plan from `--rates`."""
    if not part.memory_bytes:
        return "as measured"
    return f"{part.memory_bytes / 1e9:.3g} of {part.memory_limit_bytes / 1e9:.3g}"


def gpu_names(gpu_ids: Sequence[str]) -> str:
    """Return the names of the GPUs of at most four nodes, such as `h800:0-7`, and the number of further nodes."""
    by_node: dict[str, list[int]] = {}
    for gpu in gpu_ids:
        node, _, index = gpu.rpartition(":")
        by_node.setdefault(node, []).append(int(index))
    parts = []
    for node, indices in by_node.items():
        ordered = sorted(indices)
        is_range = len(ordered) > 1 and ordered[-1] - ordered[0] == len(ordered) - 1
        shown = f"{ordered[0]}-{ordered[-1]}" if is_range else ",".join(map(str, ordered))
        parts.append(f"{node}:{shown}")
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more machines" if len(parts) > 4 else "")


def money(value: float, currency: str) -> str:
    """Return a price with its currency, such as "3.20 USD"."""
    if value >= 1000:
        return f"{value:,.0f} {currency}"
    return f"{value:.2f} {currency}" if value >= 1 else f"{value:.3g} {currency}"
