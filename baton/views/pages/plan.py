"""Write the page of a plan: self-contained HTML without scripts or network access. Its charts show the roles of the
GPUs, the timeline of a train step, throughput by price, and the effect of one more GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import combinations, cycle
from pathlib import Path

from matplotlib.axes import Axes

from baton.files import write_whole
from baton.planner.plan_from_solution import seconds
from baton.planner.result import PlanResult
from baton.planner.what_if import Marginal, PricePoint
from baton.specs.cluster import GB, Cluster
from baton.specs.plan import Plan
from baton.views.pages.canvas import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, draw
from baton.views.pages.template import render_template
from baton.views.terminal.plan import gpu_names, memory, money, plan_cells, replicas_by_shape, training_shape

CELL, GAP, PAD, WIDTH = 13, 3, 8, 1160
TRAIN_COLOURS = ("--s1", "--s5", "--ink-2")
ROLLOUT_COLOURS = ("--s3", "--s2", "--s6")
REWARD_COLOUR = "--s4"
IDLE_COLOUR = "--rule"
MOST_MACHINES = 160


def write_plan_page(path: Path, result: PlanResult, curve: Sequence[PricePoint]) -> None:
    """Write the page of a plan to a path that has passed `check_page`. `curve`: points of throughput by price."""
    plan, marginals = result.plan, result.marginals
    by_gpu, keys = _colours(plan)
    page = render_template(
        "plan.html",
        {"seconds": seconds, "memory": memory, "gpus": gpu_names},
        plan=plan,
        shape=training_shape,
        tiles=list(_tiles(plan)),
        keys=keys,
        drawing=_cluster_drawing(result.cluster, by_gpu),
        timeline=_timeline(plan),
        curve=_curve_drawing(curve, plan) if len(curve) > 1 else "",
        more=_marginal_drawing(marginals) if marginals else "",
        replicas=replicas_by_shape(plan),
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


# ---- charts ----------------------------------------------------------------------------------------------------------


def _colours(plan: Plan) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the colour of each GPU, and the legend as (colour, meaning). Colours are CSS variables of the page.
    Colocated GPUs get the colours of their engines."""
    by_gpu: dict[str, str] = {}
    keys = []
    for stage, colour in zip(plan.training.stages, cycle(TRAIN_COLOURS), strict=False):
        by_gpu |= dict.fromkeys(stage.gpu_ids, colour)
        layers = f"layers {stage.layers[0]} to {stage.layers[1] - 1}"
        keys.append((colour, f"train: {len(stage.gpu_ids)} {stage.gpu}, {training_shape(plan, stage)}, {layers}"))
    for same, colour in zip(replicas_by_shape(plan), cycle(ROLLOUT_COLOURS), strict=False):
        by_gpu |= {gpu: colour for replica in same for gpu in replica.gpu_ids}
        r = same[0]
        shape = f"{len(same)} × {r.gpu}, tp {r.tp} · pp {r.pp}, {r.batch} trajectories concurrently"
        keys.append((colour, f"rollout: {shape}"))
    if (reward := plan.reward) is not None:
        by_gpu |= dict.fromkeys(reward.gpu_ids, REWARD_COLOUR)
        keys.append((REWARD_COLOUR, f"reward model {reward.model}: {len(reward.gpu_ids)} {reward.gpu}"))
    if plan.idle:
        by_gpu |= {gpu: IDLE_COLOUR for idle in plan.idle for gpu in idle.gpu_ids}
        keys.append((IDLE_COLOUR, f"idle: {sum(len(idle.gpu_ids) for idle in plan.idle)} GPUs"))
    return by_gpu, keys


def _cluster_drawing(cluster: Cluster, by_gpu: Mapping[str, str]) -> str:
    """Return an SVG of the machines by GPU type, with link speeds. `by_gpu`: the colour of each GPU, for its role."""
    parts: list[str] = []
    y = 0.0
    for name, own in cluster.places.items():
        shown = own[:MOST_MACHINES]
        more = f", {len(own) - len(shown)} more machines not drawn" if len(own) > len(shown) else ""
        total = sum(cluster.nodes[place].num_gpus for place in own)
        machines = "1 machine" if len(own) == 1 else f"{len(own)} machines"
        title = f"{name} · {total} GPUs in {machines}{_within(cluster, own)}{more}"
        parts.append(f'<text x="0" y="{y + 13:.0f}" fill="var(--ink)" font-size="13">{escape(title)}</text>')
        y += 22
        x = 0.0
        for place in shown:
            node = cluster.nodes[place]
            columns = min(4, node.num_gpus)
            rows = -(-node.num_gpus // columns)
            width = columns * (CELL + GAP) - GAP + 2 * PAD
            height = rows * (CELL + GAP) - GAP + 2 * PAD
            if x + width > WIDTH:
                x, y = 0.0, y + height + 8
            parts.append(_rect(x, y, width, height, 'rx="5" fill="none" stroke="var(--rule)"', node.name))
            for index, gpu in enumerate(node.gpu_ids):
                left = x + PAD + index % columns * (CELL + GAP)
                top = y + PAD + index // columns * (CELL + GAP)
                parts.append(_rect(left, top, CELL, CELL, f'rx="2" fill="var({by_gpu.get(gpu, IDLE_COLOUR)})"', gpu))
            x += width + 8
        y += height + 16
    crossing = _crossing(cluster)
    if crossing:
        parts.append(f'<text x="0" y="{y + 4:.0f}" fill="var(--ink-2)" font-size="12.5">{escape(crossing)}</text>')
        y += 14
    return f'<svg role="img" viewBox="0 0 {WIDTH} {y + 4:.0f}">{"".join(parts)}</svg>'


def _rect(x: float, y: float, width: int, height: int, style: str, title: str) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width}" height="{height}"'
    return f"<rect {place} {style}><title>{escape(title)}</title></rect>"


def _within(cluster: Cluster, own: Sequence[int]) -> str:
    found = f" · {cluster.nodes[own[0]].link_bytes_per_s / GB:g} GB/s within a machine"
    between = {cluster.bytes_per_s[a][b] / GB for a, b in combinations(own, 2)}
    return f"{found}, {_range(between)} GB/s between machines" if between else found


def _crossing(cluster: Cluster) -> str:
    found = []
    for first, second in combinations(cluster.gpu_types, 2):
        rates = {
            cluster.bytes_per_s[a][b] / GB
            for a, one in enumerate(cluster.nodes)
            for b, other in enumerate(cluster.nodes)
            if (one.gpu.name, other.gpu.name) == (first, second)
        }
        found.append(f"{first} – {second} {_range(rates)}")
    return f"Between types, GB/s: {' · '.join(found)}" if found else ""


def _range(values: set[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g} to {high:g}" if high > low else f"{low:g}"


def _timeline(plan: Plan) -> str:
    """Draw one train step: the stages of the rollout and of the trainer."""
    b, t = plan.breakdown, plan.training
    late_s = 0.0 if b.overlaps else b.rollout_s + b.reward_s
    pause = max((replica.pause_s for replica in plan.replicas), default=0.0)
    lanes = {
        1: [
            ("prefill again, or tail", min(pause, b.rollout_s), ORANGE),
            ("generate", b.rollout_s - min(pause, b.rollout_s), GREEN),
            ("rewards", b.reward_s, PURPLE),
        ],
        0: [
            ("train", t.compute_s, BLUE),
            ("pipeline bubble", t.bubble_s, GREY),
            ("gradients, optimiser", t.comm_s + t.optimizer_s, SKY),
        ],
    }

    def paint(axes: Axes) -> None:
        for lane, parts in lanes.items():
            start = late_s if lane == 0 else 0.0
            for name, length, colour in parts:
                if length > 0.002 * b.step_s:  # a thinner bar would be invisible, but the legend would list it
                    axes.barh(lane, length, left=start, height=0.42, color=colour, label=name)
                start += length
        end = b.step_s - b.sync_s
        for lane in (0, 1):
            axes.barh(lane, b.sync_s, left=end, height=0.42, color=INK, label="publish weights" if lane else None)
        axes.text(0, 1.27, "rollout", va="bottom")
        axes.text(0, 0.27, "trainer", va="bottom")
        axes.set_ylim(-0.4, 1.75)
        axes.set_xlim(0, b.step_s * 1.02)
        axes.yaxis.set_visible(False)

    return draw(paint, x="seconds of a step", y="")


def _curve_drawing(spots: Sequence[PricePoint], plan: Plan) -> str:
    def paint(axes: Axes) -> None:
        others = [s for s in spots if not s.is_efficient]
        best = [s for s in spots if s.is_efficient]
        axes.plot([s.price_per_h for s in others], [s.tokens_per_s for s in others], "o", color=GREY, label="dominated")
        axes.plot([s.price_per_h for s in best], [s.tokens_per_s for s in best], "o-", color=BLUE, label="efficient")
        axes.plot([plan.price_per_h], [plan.tokens_per_s], "D", color=ORANGE, markersize=7, label="this plan")
        axes.set_xlim(left=0)

    return draw(paint, x=f"price per hour, {plan.currency}", y="trained tokens/s", from_zero=True)


def _marginal_drawing(marginals: Sequence[Marginal]) -> str:
    def paint(axes: Axes) -> None:
        axes.bar([m.gpu for m in marginals], [100 * m.gain for m in marginals], width=0.5, color=GREEN)
        for index, marginal in enumerate(marginals):
            axes.text(index, 100 * marginal.gain, f"{100 * marginal.gain:+.2g} %", ha="center", va="bottom")
        axes.margins(y=0.2)
        axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))  # otherwise the axis of zeros has hundredths of a percent

    return draw(paint, x="one more GPU of", y="throughput gained, %", from_zero=True)
