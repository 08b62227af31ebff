"""Planning with a table of rates: exact equals enumeration, and the paper's clusters behave as they must."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import UserError
from baton.planner.instance import make_problem
from baton.planner.problem import Inputs
from baton.planner.published_method import divisions, objectives
from baton.specs.cluster import Cluster, ClusterSettings
from baton.specs.plan import RATED_SLOTS
from tests.planner.planner_cases import enumerated_step_s, make_plan, model, rates, work

TABLE_1 = {
    # AReaL-Hex table 1: tokens per second are in proportion to price over price per token; infer, train
    "1.5b": rates(H800_paper=(5.28 / 1.66e-3, 5.28 / 5.58e-3), H20_paper=(1.85 / 5.16e-3, 1.85 / 2.06e-3)),
    "7b": rates(H800_paper=(5.28 / 3.05e-3, 5.28 / 1.14e-2), H20_paper=(1.85 / 9.51e-3, 1.85 / 4.15e-3)),
    "14b": rates(H800_paper=(5.28 / 0.99e-2, 5.28 / 3.43e-2), H20_paper=(1.85 / 3.10e-2, 1.85 / 1.27e-2)),
}
CLUSTERS = [(8, 16), (8, 24), (8, 32), (8, 48), (24, 0), (24, 24), (0, 64)]


def paper_cluster(h800: int, h20: int, node: int = 8) -> Cluster:
    nodes = [{"gpu": g, "gpus": node, "count": n // node} for g, n in (("H800-paper", h800), ("H20-paper", h20)) if n]
    links = {"inter_node_gb_per_s": 5, "cross_type_gb_per_s": 1.5}
    return ClusterSettings.model_validate({"name": f"{h800}+{h20}", "links": links, "nodes": nodes}).build()


def question(h800: int, h20: int, size: str = "7b", **changes: object) -> Inputs:
    load = work(
        groups=512,
        group_size=16,
        prompt_tokens={"mean": 1},
        output_tokens={"mean": 5000},
        trainer="idealised",
        **changes,
    )
    return Inputs(paper_cluster(h800, h20), model(), load, rates=TABLE_1[size])


@pytest.mark.parametrize("size", list(TABLE_1))
@pytest.mark.parametrize(("h800", "h20"), CLUSTERS)
def test_exact_equals_enumeration_and_the_papers_method_never_beats_it(h800: int, h20: int, size: str) -> None:
    asked = question(h800, h20, size)
    exact, paper = make_plan(asked), make_plan(asked, "paper")
    assert exact.breakdown.step_s == pytest.approx(enumerated_step_s(asked), rel=1e-9)
    assert exact.bound.is_proven
    assert paper.breakdown.step_s >= exact.breakdown.step_s * (1 - 1e-9)
    assert paper.bound.step_s == pytest.approx(exact.breakdown.step_s)


@pytest.mark.parametrize(("h800", "h20"), [(8, 16), (8, 24), (8, 32), (8, 48), (24, 24)])
def test_the_gpu_that_trains_better_trains_first(h800: int, h20: int) -> None:
    plan = make_plan(question(h800, h20))
    assert "H800-paper" in {stage.gpu for stage in plan.training.stages}
    assert "H20-paper" in {replica.gpu for replica in plan.replicas}


def test_an_engine_of_a_plan_with_rates_generates_many_trajectories_at_once() -> None:
    """`baton train --plan --ray` starts engines with this number of slots."""
    assert {replica.batch for replica in make_plan(question(8, 16)).replicas} == {RATED_SLOTS}


def test_equation_3_prefers_the_wrong_gpus_and_the_plan_does_not() -> None:
    """8 H800 + 48 H20: training on the 8 H800 scores 0.988, on 40 H20 0.995; yet the H800 must train."""
    asked = question(8, 48)
    problem = make_problem(asked)
    names = [pool.gpu for pool in problem.pools.pools]
    assert names == ["H800-paper", "H20-paper"]
    good, bad = objectives(problem, np.array([[8, 0], [0, 40]]))
    assert (round(good, 3), round(bad, 3)) == (0.988, 0.995)
    # on 8 + 24 and 8 + 16 it still prefers the H800
    for h20, best, others in ((16, 0.979, [5, 16]), (24, 0.983, [3, 24])):
        scores = objectives(make_problem(question(8, h20)), np.array([[8, 0], others]))
        assert (round(scores[0], 3), bool(scores[1] < best)) == (best, True)
    assert not any(replica.gpu == "H800-paper" for replica in make_plan(asked).replicas)


def test_many_equal_gpus_divide_as_the_closed_form_says() -> None:
    """LlamaRL: training's share is g/(t + g) for rates t, g per GPU; 1,024 GPUs come within 1/N of it."""
    load = work(prompt_tokens={"mean": 1}, output_tokens={"mean": 5000}, trainer="idealised")
    asked = Inputs(paper_cluster(1024, 0), model(), load, rates=rates(H800_paper=(3.7, 1.0)))
    plan = make_plan(asked)
    share = len(plan.training.gpu_ids) / 1024
    exact = load.trained_tokens / 3.7 / (load.trained_tokens / 3.7 + load.output_tokens / 1.0)
    assert share == pytest.approx(exact, abs=1 / 1024)
    assert plan.bound.gap < 0.01


def test_a_thousand_gpus_of_four_types_carry_a_small_gap() -> None:
    names = ["H100", "A100-80", "H20", "L40S"]
    links = {"inter_node_gb_per_s": 25, "cross_type_gb_per_s": 10}
    nodes = [{"gpu": name, "count": 32} for name in names]
    of = ClusterSettings.model_validate({"name": "1024", "links": links, "nodes": nodes}).build()
    table = rates(H100=(9, 3), A100_80=(3, 1.6), H20=(1.4, 2.9), L40S=(1.8, 0.7))
    asked = Inputs(of, model(), work(groups=2048, trainer="idealised"), rates=table)
    plan = make_plan(asked)
    assert plan.bound.gap < 0.01
    assert len(divisions(make_problem(asked))) <= 50_000
    assert make_plan(asked, "paper").breakdown.step_s >= plan.breakdown.step_s * (1 - 1e-9)


def test_a_type_without_rates_is_named() -> None:
    with pytest.raises(UserError, match="H20-paper is in the cluster but not in the table"):
        make_plan(Inputs(paper_cluster(8, 8), model(), work(trainer="idealised"), rates=rates(H800_paper=(1, 1))))


# ---- laws ------------------------------------------------------------------------------------------------------------

RATE = st.floats(0.1, 10)
COUNT = st.integers(1, 6)


def small(counts: tuple[int, int], table: tuple[float, ...], order: bool = False) -> Inputs:
    nodes = [{"gpu": "H20", "gpus": counts[0]}, {"gpu": "H800", "gpus": counts[1]}]
    links = {"inter_node_gb_per_s": 5}
    shown = {"name": "x", "links": links, "nodes": nodes[::-1] if order else nodes}
    table_ = rates(H20=(table[0], table[1]), H800=(table[2], table[3]))
    return Inputs(ClusterSettings.model_validate(shown).build(), model(), work(trainer="idealised"), rates=table_)


def fastest(asked: Inputs) -> float:
    return make_plan(asked).breakdown.step_s


@settings(max_examples=40, deadline=None)
@given(st.tuples(COUNT, COUNT), st.tuples(RATE, RATE, RATE, RATE), st.floats(0.5, 4))
def test_laws_of_rates(counts: tuple[int, int], table: tuple[float, ...], factor: float) -> None:
    """Enumeration agrees; another GPU never hurts; order is nothing; rates times k is throughput times k."""
    step_s = fastest(small(counts, table))
    assert step_s == pytest.approx(enumerated_step_s(small(counts, table)), rel=1e-9)
    assert fastest(small((counts[0] + 1, counts[1]), table)) <= step_s * (1 + 1e-9)
    assert fastest(small((counts[0], counts[1] + 1), table)) <= step_s * (1 + 1e-9)
    assert fastest(small(counts, table, order=True)) == pytest.approx(step_s, rel=1e-9)
    scaled = tuple(rate * factor for rate in table)
    assert fastest(small(counts, scaled)) == pytest.approx(step_s / factor, rel=1e-9)


def test_publication_across_types_is_weighed_against_what_it_brings() -> None:
    """Engines on the other type cost 10 s a step: worth it only where they save more than that."""
    draw = random.Random(1)
    for _ in range(10):
        table = tuple(draw.uniform(50, 500) for _ in range(4))
        asked = small((4, 4), table)
        assert asked.rates is not None
        slow = asked.rates.model_copy(update={"cross_sync_s": 10.0})
        free, paid = fastest(asked), fastest(Inputs(asked.cluster, asked.model, asked.work, rates=slow))
        assert free <= paid * (1 + 1e-9)
        assert paid <= free + 10 + 1e-9
