"""The exact planner against searches that share nothing with it but the costs of single shapes."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from baton.errors import UserError
from baton.planner.problem import Inputs
from tests.planner.planner_cases import brute_step_s, cluster, inputs, make_plan

CASES = int(os.environ.get("BATON_PLANNER_CASES", "120"))
"""Random clusters; more of them: BATON_PLANNER_CASES=1000 pytest tests/planner."""


def question(seed: int) -> Inputs:
    draw = random.Random(seed)
    nodes = [("Fast", draw.randint(1, 3)), ("Slow", draw.choice([1, 2, 4]))]
    if draw.random() < 0.3:
        nodes = [("Slow", 2), ("Slow", draw.choice([1, 2]))]
    of = cluster(
        *nodes,
        fast_gb=draw.choice([0.2, 0.3, 1.0]),
        slow_gb=draw.choice([0.15, 0.25, 0.6]),
        fast_tflops=draw.choice([20.0, 50.0, 200.0]),
    )
    return inputs(
        of,
        mixed_stages=seed % 2 == 0,
        trainer=draw.choice(["baton", "idealised"]),
        max_staleness=draw.choice([1, 2, 8]),
        groups=draw.choice([3, 12]),
        engine={"max_batch": draw.choice([2, 4]), "reprefill": draw.random() < 0.8},
        algorithm={"recompute": draw.random() < 0.7, "critic": draw.random() < 0.2},
        microbatch_tokens=draw.choice([0, 2000]),
    )


def solved(asked: Inputs) -> float:
    try:
        return make_plan(asked).breakdown.step_s
    except UserError:
        return float("inf")


@pytest.mark.parametrize("seed", range(CASES))
def test_exact_equals_trying_everything(seed: int) -> None:
    asked = question(seed)
    assert solved(asked) == pytest.approx(brute_step_s(asked), rel=2e-4)


@pytest.mark.parametrize("seed", range(CASES // 4))
def test_pipelines_of_several_stages_equal_trying_everything(seed: int) -> None:
    """Machines of one or two GPUs with little memory: a third of them needs a pipeline of three or four stages."""
    draw = random.Random(seed)
    nodes = [(draw.choice(["Fast", "Slow"]), draw.choice([1, 1, 2])) for _ in range(draw.randint(4, 5))]
    of = cluster(*nodes, fast_gb=draw.choice([0.1, 0.12]), slow_gb=draw.choice([0.1, 0.12]))
    asked = inputs(of, mixed_stages=seed % 2 == 0, trainer=draw.choice(["baton", "idealised"]))
    assert solved(asked) == pytest.approx(brute_step_s(asked), rel=2e-4)


@pytest.mark.parametrize("seed", range(CASES // 2))
def test_decomposition_bounds_what_it_does_not_enumerate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if crossing pipelines were too many to look at: the bound stays below the optimum, the plan not above the
    gap."""
    asked = question(seed)
    optimum = solved(asked)
    monkeypatch.setattr("baton.planner.training_shapes.MAX_SHAPES", 0)
    try:
        plan = make_plan(asked)
    except UserError:
        return  # found by none of the shapes that were looked at: a refusal, not a plan beyond its bound
    assert plan.bound.step_s <= optimum * (1 + 1e-9)
    assert optimum <= plan.breakdown.step_s * (1 + 1e-9)
    assert plan.breakdown.step_s <= plan.bound.step_s * (1 + plan.bound.gap) * (1 + 1e-9)


def test_a_pool_of_two_machines_may_be_better_off_with_one() -> None:
    """The second machine's link is so slow that weights through it would cost more than its engines bring."""
    alone = make_plan(inputs(cluster(("Fast", 4))))
    both = cluster(("Fast", 4), ("Fast", 1))
    slow = tuple(tuple(1e4 for _ in row) for row in both.bytes_per_s)
    plan = make_plan(inputs(msgspec.structs.replace(both, bytes_per_s=slow)))
    assert plan.breakdown.step_s == pytest.approx(alone.breakdown.step_s)
    assert [idle.gpu_ids for idle in plan.idle] == [("n1:0",)]
    assert plan.price_per_h == 20


def test_a_plan_of_machines_that_differ_carries_a_bound() -> None:
    """Three machines of one type, one of them behind a slow link: pools cannot name them by number alone."""
    of = cluster(("Slow", 2), ("Slow", 2), ("Slow", 2))
    slow = [[0.0, 1e15, 1e8], [1e15, 0.0, 1e7], [1e8, 1e7, 0.0]]
    plan = make_plan(inputs(msgspec.structs.replace(of, bytes_per_s=tuple(map(tuple, slow)))))
    same = make_plan(inputs(of))
    assert plan.bound.step_s <= same.breakdown.step_s * (1 + 1e-9) <= plan.breakdown.step_s * (1 + 2e-9)
    assert "fastest link" in plan.bound.note
    assert plan.bound.gap == pytest.approx(plan.breakdown.step_s / plan.bound.step_s - 1)
