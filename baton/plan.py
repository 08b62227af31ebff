"""Part of the Python API: `baton.plan.plan` decides which GPUs train and which generate, as the command `baton plan`
does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from baton.cost.calibration import calibrate
from baton.cost.efficiency import CalibrationSettings, RatesSettings
from baton.errors import UserError
from baton.files import check_output
from baton.planner.certainty import certainty
from baton.planner.colocated import make_colocated_plan
from baton.planner.compare import alternatives
from baton.planner.problem import Inputs
from baton.planner.rental import OffersSettings, rent_for_budget, rent_for_target
from baton.planner.replan import replan_with_reward, without_nodes
from baton.planner.result import PlanResult
from baton.planner.reward_stage import plan_with_reward
from baton.planner.solve import make_plan
from baton.planner.what_if import marginals
from baton.recipe.shipped import find
from baton.recipe.workload import read_cluster, read_settings, read_workload
from baton.records.predictions import read_predictions
from baton.run.predictions import measured_rates
from baton.specs.cluster import Cluster, gpu_types
from baton.specs.model import read_model
from baton.specs.plan import Method, read_plan, write_plan
from baton.specs.trainer_shapes import Trainer
from baton.views.pages.template import check_page


def plan(
    model: str | Path,
    workload: str | Path,
    cluster: str | Path | None = None,
    *,
    offers: str | Path | None = None,
    budget: float | None = None,
    target_throughput: float | None = None,
    compare: bool = False,
    colocated: bool = False,
    method: Method = "exact",
    trainer: Trainer = "baton",
    symmetric_only: bool = False,
    mixed_stages: bool = False,
    robust: bool = False,
    rates: str | Path | None = None,
    calibration: str | Path | None = None,
    running: str | Path | None = None,
    lost: Sequence[str] = (),
    slack: float = 0.02,
    time_limit: float = 60.0,
    write_to: str | Path | None = None,
    html: str | Path | None = None,
) -> PlanResult:
    """Return the plan with the highest throughput on a cluster. With `offers`, also select the machines to rent.

    The arguments are the options of `baton plan`, which `baton plan --help` explains; `running` is the option --from,
    and `write_to` is --out. `write_to` and `html` are files to write.

    Raises UserError for invalid arguments, and if no plan is feasible.
    """
    _check_options(
        {
            "--cluster": cluster,
            "--offers": offers,
            "--budget": budget,
            "--target-throughput": target_throughput,
            "--from": running,
            "--lost": lost or None,
            "--rates": rates,
            "--calibration": calibration,
            "--colocated": colocated or None,
            "--robust": robust or None,
            "--method": None if method == "exact" else method,
            "--mixed-stages": mixed_stages or None,
            "--symmetric-only": symmetric_only or None,
            "--trainer": None if trainer == "baton" else trainer,
        }
    )
    if write_to is not None:
        check_output(Path(write_to))
    if html is not None:
        check_page(Path(html))
    existing = Cluster("none", (), ()) if cluster is None else read_cluster(find(cluster))
    measured = None if calibration is None else read_settings(CalibrationSettings, find(calibration))
    given = None if offers is None else read_settings(OffersSettings, find(offers))
    gpus = [node.gpu for node in existing.nodes] if given is None else gpu_types(given.gpu).values()
    calibrated = calibrate(gpus, measured)
    inputs = Inputs(
        cluster=without_nodes(existing, lost) if lost else existing,
        model=read_model(find(model)),
        work=msgspec.structs.replace(read_workload(find(workload)), trainer=trainer),
        efficiencies=calibrated.at(lambda each: each.worst) if robust else calibrated.at(),
        rates=None if rates is None else read_settings(RatesSettings, find(rates)),
        cross_types=not symmetric_only,
        mixed_stages=mixed_stages,
    )
    lines: tuple[str, ...] = ()
    if running is not None:
        before = read_plan(Path(running))
        if rates is None:
            run = find(workload)
            efficiencies, lines = measured_rates(inputs.efficiencies, before, read_predictions(run), run)
            inputs = msgspec.structs.replace(inputs, efficiencies=efficiencies)
        found = replan_with_reward(inputs, before, slack=slack, time_limit_s=time_limit)
        result = PlanResult(found.chosen.plan, inputs.cluster, found.chosen.inputs, replanned=found, measured=lines)
    elif given is not None:
        if budget is not None:
            choice = rent_for_budget(inputs, given, budget, time_limit_s=time_limit)
        else:
            choice = rent_for_target(inputs, given, target_throughput or 0.0, time_limit_s=time_limit)
        result = PlanResult(choice.plan, choice.inputs.cluster, choice.inputs_of_the_rest, choice=choice)
    else:
        plan_rest = make_colocated_plan if colocated else partial(make_plan, method=method)
        best, inputs_of_the_rest = plan_with_reward(inputs, plan_rest, time_limit_s=time_limit)
        result = PlanResult(best, inputs.cluster, inputs_of_the_rest)
    if rates is None and not lines and method == "exact" and not result.plan.is_colocated:
        sure = certainty(result.inputs, result.plan, calibrated, is_robust=robust, time_limit_s=time_limit / 4)
        result = msgspec.structs.replace(result, certainty=sure)
    if compare or html is not None:
        result = msgspec.structs.replace(
            result,
            marginals=marginals(result.inputs, result.plan.tokens_per_s, time_limit_s=time_limit / 4),
            alternatives=alternatives(result.inputs, reward_per_h=result.reward_per_h, time_limit_s=time_limit),
        )
    if write_to is not None:
        write_plan(result.plan, Path(write_to))
    if html is not None:
        from baton.views.pages.plan import write_plan_page

        write_plan_page(Path(html), result, result.price_curve())
    return result


def _check_options(values: Mapping[str, object]) -> None:
    """Raise UserError for options that contradict each other. Options that are not given have the value None."""
    given = {name for name, value in values.items() if value is not None}
    limits = given & {"--budget", "--target-throughput"}
    for name in sorted(limits):
        if not 0 < (limit := cast(float, values[name])) < math.inf:
            raise UserError(f"{name}: got {limit:g}, allowed are positive numbers")
    contradictions = {
        "--budget and --target-throughput exclude each other: fix the price or the throughput": len(limits) == 2,
        "--offers needs --budget or --target-throughput, and each of these needs --offers": (
            ("--offers" in given) != bool(limits)
        ),
        "give --cluster (existing GPUs), or --offers with --budget or --target-throughput": (
            ("--offers" in given) == ("--cluster" in given)
        ),
        "--from replans a cluster: give --cluster with it, without --offers and --colocated": (
            "--from" in given and bool(given & {"--offers", "--colocated"})
        ),
        "--colocated and --method apply to a --cluster: use them to plan the rented machines afterwards": (
            "--offers" in given and bool(given & {"--colocated", "--method"})
        ),
        "--method does not apply to --from and --colocated: remove --method": (
            "--method" in given and bool(given & {"--from", "--colocated"})
        ),
        "--rates and --calibration exclude each other: measured rates replace the cost model": (
            given >= {"--rates", "--calibration"}
        ),
        "--rates and --robust exclude each other: measured rates have no range": given >= {"--rates", "--robust"},
        "--mixed-stages needs Baton's trainer and the cost model: remove --symmetric-only, --colocated, --rates, "
        "--method and --trainer": "--mixed-stages" in given
        and bool(given & {"--symmetric-only", "--colocated", "--rates", "--method", "--trainer"}),
        "--lost names machines of a cluster: give --cluster": "--lost" in given and "--cluster" not in given,
    }
    for sentence, holds in contradictions.items():
        if holds:
            raise UserError(sentence)
