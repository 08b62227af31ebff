"""What `baton simulate` does: reads what a user gives, simulates, prints the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from baton.console import Console, print_json
from baton.cost.efficiency import CalibrationSettings, Efficiencies
from baton.errors import UserError
from baton.files import write_whole
from baton.recipe.load import load_recipe
from baton.recipe.workload import read_cluster, read_workload
from baton.records.trace import chrome_trace
from baton.simulator.faults import FaultsSettings
from baton.simulator.find import InvariantBroken, broken_law
from baton.simulator.log import EventLog
from baton.simulator.parameter_sweep import read_axes, sweep
from baton.simulator.result import Result, summarise
from baton.simulator.run import RunOptions, simulate
from baton.simulator.setting import Setting
from baton.simulator.sources import PlanSource, RecipeSource, SettingSource, SimulationOptions, recorded_groups
from baton.simulator.tracing import Spans
from baton.simulator.world import NoProgress
from baton.specs.model import read_model
from baton.specs.plan import read_plan
from baton.views.terminal.simulation import print_result, print_sweep


class SimulationRequest(msgspec.Struct, frozen=True):
    """What was asked on the command line; each field is the option of its name."""

    overrides: Sequence[str] | None = None
    plan: Path | None = None
    recipe: Path | None = None
    model: Path | None = None
    workload: Path | None = None
    cluster: Path | None = None
    calibration: Path | None = None
    steps: int | None = None
    faults: Path | None = None
    seed: int = 0
    correlation: float = 0.0
    drift: float = 0.0
    judge_cv: float = 0.0
    laws: bool = False
    sweep: Sequence[str] | None = None
    trace: Path | None = None
    html: Path | None = None
    log: Path | None = None
    as_json: bool = False


def run(question: SimulationRequest, out: Console) -> None:
    """Answer a question and print or write the answer. Raises UserError, and InvariantBroken with the log that shows
    it.
    """
    source, simulation_options = _source(question), _wishes(question)
    if question.html is not None:
        _check_page(question.html)
    faults = load_recipe(FaultsSettings, question.faults) if question.faults is not None else FaultsSettings()
    schedule = faults.schedule(question.seed)
    options = RunOptions(question.seed, schedule, question.laws)
    if question.sweep:
        _run_sweep(question, source, simulation_options, options, out)
        return
    setting = source.setting(simulation_options)
    result = _run_one(question, setting, options)
    if question.as_json:
        print_json(result)
        return
    print_result(out, result)
    _say_written(question, out)


def _run_one(question: SimulationRequest, setting: Setting, options: RunOptions) -> Result:
    log = EventLog() if question.log is not None else None
    tracer = Spans() if question.trace is not None or question.html is not None else None
    try:
        record = simulate(setting, replace(options, log=log, tracer=tracer))
    except NoProgress as error:
        raise UserError(f"the run stands still: {error}; seed {question.seed}") from error
    except AssertionError as error:
        found = broken_law(setting, options)
        raise InvariantBroken(found.sentence() if found is not None else str(error)) from error
    finally:
        if question.log is not None and log is not None:
            write_whole(question.log, b"\n".join(log.lines) + b"\n")
    result = summarise(setting, record)
    spans = tracer.spans if tracer is not None else []
    if question.trace is not None:
        write_whole(question.trace, chrome_trace(spans))
    if question.html is not None:
        from baton.views.pages.simulation import write_result_page

        write_result_page(question.html, result, spans)
    return result


def _run_sweep(
    question: SimulationRequest,
    source: SettingSource,
    simulation_options: SimulationOptions,
    options: RunOptions,
    out: Console,
) -> None:
    swept = sweep(source, simulation_options, read_axes(question.sweep or ()), options)
    if question.html is not None:
        from baton.views.pages.simulation import write_sweep_page

        write_sweep_page(question.html, swept)
    if question.as_json:
        print_json(swept)
        return
    print_sweep(out, swept)
    _say_written(question, out)


def _say_written(question: SimulationRequest, out: Console) -> None:
    for path in (question.log, question.html, question.trace):
        if path is not None:
            out.print(f"written: {path}", soft_wrap=True)


def _source(question: SimulationRequest) -> SettingSource:
    if (question.plan is None) == (question.recipe is None):
        raise UserError("give --plan (GPUs, as baton plan divides them) or --recipe (this machine), one of the two")
    calibration = question.calibration
    efficiencies = load_recipe(CalibrationSettings, calibration).build() if calibration is not None else None
    work = read_workload(question.workload) if question.workload is not None else None
    if question.recipe is not None:
        return RecipeSource(question.recipe, efficiencies, work)
    assert question.plan is not None, "one of the two is given"
    plan = read_plan(question.plan)
    if question.model is None or work is None:
        raise UserError("--plan needs --model and --workload, those that the plan was made for: it names them only")
    of = read_cluster(question.cluster) if question.cluster is not None else None
    return PlanSource(plan, read_model(question.model), work, efficiencies or Efficiencies(), of)


def _wishes(question: SimulationRequest) -> SimulationOptions:
    return SimulationOptions(
        tuple(question.overrides or ()),
        question.steps,
        question.correlation,
        question.drift,
        question.judge_cv,
        recorded=recorded_groups(question.workload) if question.workload and question.workload.is_dir() else (),
        is_detailed=question.faults is not None or question.laws,
    )


def _check_page(path: Path) -> None:
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UserError(f"--html needs {' and '.join(missing)}, not installed: run `pip install 'baton-rl[plan]'`")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{path} is no place for a page: allowed is a file in a directory that exists")
