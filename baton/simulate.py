"""Part of the Python API: `baton.simulate.simulate` runs a recipe or a plan in virtual time, as the command `baton
simulate` does."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.clock import Clock, time_left
from baton.cluster.plan_check import check_inputs
from baton.cost.calibration import calibrate
from baton.cost.efficiency import CalibrationSettings
from baton.errors import UserError
from baton.files import check_output, write_whole
from baton.recipe.shipped import find
from baton.recipe.workload import read_cluster, read_settings, read_workload
from baton.records.trace import chrome_trace
from baton.simulator.faults import FaultsSettings
from baton.simulator.input_sources import PlanSource, RecipeSource, SettingSource, SimulationOptions, recorded_groups
from baton.simulator.parameter_sweep import ParameterSweep, read_axes
from baton.simulator.parameter_sweep import sweep as sweep_parameters
from baton.simulator.result import Result
from baton.simulator.run import run_request
from baton.simulator.simulation import RunOptions
from baton.specs.model import read_model
from baton.specs.plan import read_plan
from baton.views.pages.template import check_page

logger = logging.getLogger(__name__)
PROGRESS_S = 10.0
"""Interval in seconds between two messages of a long simulation."""


def progress(
    report: Callable[[str], None], timeout: Callable[[float], Clock] = time_left
) -> Callable[[int, int], None]:
    """Return a function for `RunOptions.on_step` that reports how many steps are simulated, once in PROGRESS_S."""
    left_s = timeout(PROGRESS_S)

    def on_step(step: int, num_steps: int) -> None:
        nonlocal left_s
        if left_s() <= 0:
            left_s = timeout(PROGRESS_S)
            report(f"simulated {step} of {num_steps} train steps")

    return on_step


def simulate(
    recipe: str | Path | None = None,
    config: Mapping[str, Any] | Sequence[str] = (),
    *,
    plan: str | Path | None = None,
    model: str | Path | None = None,
    workload: str | Path | None = None,
    cluster: str | Path | None = None,
    calibration: str | Path | None = None,
    steps: int | None = None,
    faults: str | Path | None = None,
    seed: int = 0,
    correlation: float = 0.0,
    drift: float = 0.0,
    judge_cv: float = 0.0,
    sweep: Sequence[str] = (),
    log: str | Path | None = None,
    trace: str | Path | None = None,
    html: str | Path | None = None,
) -> Result | ParameterSweep:
    """Simulate a recipe on this machine, or a plan, in virtual time. With `sweep`, simulate several settings.

    The arguments are the options of `baton simulate`, which `baton simulate --help` explains; `config` has the keys of
    the recipe to change, such as `{"rollout.mode": "partial"}`. `log`, `trace` and `html` are files to write.

    Raises UserError for invalid arguments, and for a run that makes no progress.
    """
    _check_numbers(steps, seed, correlation, drift, judge_cv)
    work = None if workload is None else read_workload(find(workload))
    measured = None if calibration is None else read_settings(CalibrationSettings, find(calibration))
    source: SettingSource
    if recipe is not None and plan is None:
        if model is not None or cluster is not None:
            raise UserError("--model and --cluster apply to --plan; --recipe uses the recipe's model and this machine")
        source = RecipeSource(Path(recipe), None if measured is None else measured.build(), work)
    elif plan is None or recipe is not None:
        raise UserError("give exactly one of --plan (GPUs of a plan) and --recipe (this machine)")
    else:
        planned = read_plan(Path(plan))
        if model is None or work is None:
            raise UserError("--plan needs --model and --workload: give the model and the workload of the plan")
        spec = read_model(find(model))
        check_inputs(planned, spec, work, Path(plan))
        links = None if cluster is None else read_cluster(find(cluster))
        calibrated = calibrate([] if links is None else [node.gpu for node in links.nodes], measured)
        source = PlanSource(planned, spec, work, calibrated.at(), links)
    recorded = recorded_groups(Path(workload)) if workload is not None and Path(workload).is_dir() else ()
    changes = SimulationOptions(
        config, steps, correlation, drift, judge_cv, recorded=recorded, is_detailed=faults is not None
    )
    if sweep and (log is not None or trace is not None):
        raise UserError("--sweep writes neither --log nor --trace, because it simulates several settings: remove them")
    for path in (log, trace):
        if path is not None:
            check_output(Path(path))
    if html is not None:
        check_page(Path(html))
    failing = FaultsSettings() if faults is None else read_settings(FaultsSettings, Path(faults))
    options = RunOptions(seed, failing.schedule(seed), on_step=progress(logger.warning))  # commands print warnings only
    if sweep:
        swept = sweep_parameters(source, changes, read_axes(sweep), options)
        if html is not None:
            from baton.views.pages.simulation import write_sweep_page

            write_sweep_page(Path(html), swept)
        return swept
    events = None if log is None else Path(log)
    is_traced = trace is not None or html is not None
    result, spans = run_request(source.setting(changes), options, events, is_traced=is_traced)
    if trace is not None:
        write_whole(Path(trace), chrome_trace(spans))
    if html is not None:
        from baton.views.pages.simulation import write_result_page

        write_result_page(Path(html), result, spans)
    return result


def _check_numbers(steps: int | None, seed: int, correlation: float, drift: float, judge_cv: float) -> None:
    """Raise UserError for a number that is not allowed. `baton simulate` checks most of them when it parses options."""
    checks = (
        ("steps", steps, steps is None or steps >= 1, "integers of at least 1"),
        ("seed", seed, seed >= 0, "integers of at least 0"),
        ("correlation", correlation, 0 <= correlation <= 1, "numbers from 0 to 1"),
        ("drift", drift, math.isfinite(drift), "finite numbers"),
        ("judge-cv", judge_cv, 0 <= judge_cv < math.inf, "finite numbers of at least 0"),
    )
    for name, value, is_allowed, allowed in checks:
        if not is_allowed:
            raise UserError(f"--{name}: got {value}, allowed are {allowed}")
