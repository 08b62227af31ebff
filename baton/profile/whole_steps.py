"""Measures whole train steps: runs the recipe for a few steps, and fits how much slower trainer and engines are in this
run than when they are measured alone.

In a run, all processes of the recipe share cores and memory: trainer or ranks, engine processes or workers, controller
and hub. The run is simulated with the recorded lengths of its trajectories. The efficiencies are changed until
simulation and run have equal times of training and generation. In mode `async`, engines also wait for the trainer, so
the time of generation does not show their speed. The fit then uses the tokens per second of an occupied slot instead.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from baton.cost.efficiency import Efficiencies, Efficiency
from baton.cost.fit import Measurement
from baton.cost.memory import RUNTIME_BYTES
from baton.errors import UserError
from baton.profile.engine import Say
from baton.recipe.recipe import Recipe
from baton.recipe.workload import workload_of_run
from baton.records.metrics import read_metrics
from baton.records.predictions import (
    MEMORY,
    MemoryByTokens,
    Prediction,
    Predictions,
    Row,
    compare,
    generation_s,
    num_warm,
    steady_rows,
)
from baton.records.run_directory import RunDirectory, without_none
from baton.run.dry_run import trainer_bytes
from baton.run.predictions import DECODE_SHARES, DECODE_TIMES, scaled
from baton.simulator.input_sources import RecipeSource, SimulationOptions, recorded_groups
from baton.simulator.inputs import Setting
from baton.simulator.result import Result, RunRecord, summarise
from baton.simulator.run import simulate
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import TrainSpeed

LONGEST_S = 3600.0
"""Maximum number of seconds of the measured run."""
ROUNDS = 8
"""Number of simulations that fit the speed of the engines."""
DAMPING = 0.6
"""Power to which each correction factor of `engine_beside` is raised. The full factor would overshoot, because slower
engines also run more trajectories at a time, which slows each trajectory further."""
IDLE = 0.02
"""A train step counts as a step without generation if trajectories run in at most this share of the step's time."""
MOST_SLOWDOWN = 10.0
LEAST_RUNTIME_BYTES = 5e7


def with_whole_steps(
    recipe: Recipe, gpu: str, known: Efficiency, num_steps: int, say: Say
) -> tuple[Efficiency, list[Measurement]]:
    """Run the recipe for `num_steps` train steps, and fit the efficiencies to the run. Return the efficiencies, and the
    measurements with predictions of a simulation. Multi-turn tasks cannot be simulated; for them, only publication and
    memory are fitted. Raises UserError if the run fails."""
    recipe = _measured_recipe(recipe, num_steps)
    with tempfile.TemporaryDirectory() as directory:
        run = _run(recipe, Path(directory))
        rows = read_metrics(run)
        memory = trainer_bytes(recipe, is_here=True) if gpu == "CPU" else ()
        found = known.model_copy(update=measured_directly(recipe, rows, memory))
        points: list[Measurement] = []
        if recipe.multi_turn_task is None:
            found, points = fit_run(recipe, gpu, found, run, rows)
    for point in points:
        phase = point.phase.replace("_", " ")
        say(f"{phase}: {point.seconds:.3f} s; the cost model without this run: {point.predicted_s:.3f} s")
    return found, points


def _measured_recipe(recipe: Recipe, num_steps: int) -> Recipe:
    """Return the recipe of the measured run. The seed is changed, so that the efficiencies are not fitted to the
    batches of the run that is predicted later."""
    changes = {
        "run": {"name": "run", "seed": recipe.run.seed + 1, "steps": num_steps},
        "eval": {"enabled": False, "task": ()},
        "checkpoint": {"every": num_steps},
        "fleet": {"calibration": None},
        "log": {"loggers": (), "wandb": None},
        "trainer": {"warmup_steps": 0, "decay": "constant"},
    }
    sections = {name: getattr(recipe, name).model_copy(update=update) for name, update in changes.items()}
    return recipe.model_copy(update=sections)


def _run(recipe: Recipe, directory: Path) -> Path:
    """Run the recipe in a separate process, so it uses memory like a normal run. Return the run's directory."""
    own = recipe.run.model_copy(update={"directory": str(directory)})
    recipe, file = recipe.model_copy(update={"run": own}), directory / "recipe.toml"
    file.write_text(tomli_w.dumps(without_none(recipe.model_dump(mode="json"))), encoding="utf-8")
    command = [sys.executable, "-m", "baton", "train", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    except subprocess.TimeoutExpired as error:
        steps, minutes = recipe.run.steps, LONGEST_S / 60
        raise UserError(f"--steps: {steps} train steps take more than {minutes:.0f} minutes; give fewer") from error
    if done.returncode:
        raise UserError(f"the run that `baton profile` measures failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return own.path


def _terms(rows: Sequence[Row]) -> dict[str, float]:
    """Return the measured value of each predicted term."""
    return {each.term: each.measured or 0.0 for each in compare(Predictions("", ()), rows)}


def measured_directly(recipe: Recipe, rows: Sequence[Row], memory: MemoryByTokens) -> dict[str, float]:
    """Return the efficiencies that follow from the metrics of a run without a fit. `memory` is the predicted memory of
    the trainer; empty on a GPU."""
    terms, steady, is_async = _terms(rows), steady_rows(rows), recipe.rollout.mode == "async"
    rest_s = terms["step"] - terms["training"] - _mean(steady, "time/weight_sync")
    if is_async:
        rest_s -= _mean(steady, "time/wait_for_batch")
    else:  # the simulation counts scoring separately, and in a swarm also the time in which workers load a version
        rest_s -= terms["generation"] + _mean(steady, "time/judge") + terms["transfer"] * recipe.swarm.is_on
    found = {"publish": 1.0, "publish_latency_s": terms["transfer"], "cycle_overhead_s": max(0.0, rest_s)}
    busy = [row["time/reward_model_busy"] for row in steady if "time/reward_model_busy" in row]
    if busy:
        found["reward_model_s"] = statistics.fmean(busy) / (recipe.rollout.batch_groups * recipe.rollout.group_size)
    if memory:
        tokens = max(row["perf/trainer_peak_tokens"] for row in steady)
        outside = RUNTIME_BYTES + terms[MEMORY] - Prediction(MEMORY, memory[-1][1], memory).at(tokens)
        found["runtime_gb"] = max(LEAST_RUNTIME_BYTES, outside) / 1e9
    return found


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row.get(key, 0.0) for row in rows)


def _train_factors(run: Path, rows: Sequence[Row], speed: TrainSpeed) -> tuple[float, float]:
    """Return two factors for mode `async`. The first is for steps in which nothing is generated: the ratio of their
    measured to their predicted training time, or 1 if there are no such steps. The second is the factor by which
    training is slower while trajectories run."""
    opened, beside = RunDirectory.open(run), list[tuple[float, float, float]]()
    alone_s = predicted_s = 0.0
    for row in steady_rows(rows):
        expected_s = speed.step_s(opened.groups(int(row["step"])))
        if generation_s(row) < IDLE * row["perf/step_time"]:
            alone_s, predicted_s = alone_s + row["time/train"], predicted_s + expected_s
        else:
            beside.append((expected_s, row["time/train"], min(row["time/train"], row["time/generate_hidden"])))
    slower = alone_s / predicted_s if predicted_s else 1.0
    overlap_s = sum(hidden_s for _, _, hidden_s in beside)
    # for the work that was done during the overlap, the time that the trainer alone would have needed
    done_s = sum(slower * expected_s - train_s + hidden_s for expected_s, train_s, hidden_s in beside)
    return slower, overlap_s / max(done_s, overlap_s / MOST_SLOWDOWN) if overlap_s else 1.0


def _slot_rate(steps: Sequence[tuple[float, float]]) -> float:
    """Return the number of tokens that an occupied slot generates per second; 0 if no slot was occupied. `steps`: for
    each train step, the number of generated tokens, and the seconds in which slots were occupied, summed over slots.
    The first step does not count, because it includes the start of the engines."""
    slot_s = sum(seconds for _, seconds in steps[1:])
    return sum(tokens for tokens, _ in steps[1:]) / slot_s if slot_s else 0.0


def fit_run(
    recipe: Recipe, gpu: str, known: Efficiency, run: Path, rows: Sequence[Row]
) -> tuple[Efficiency, list[Measurement]]:
    """Fit the speeds of trainer and engines. In mode `async`, trainer and engines run at the same time, and the fit
    finds by which factor each of them slows the other down. The speed of the trainer alone is then measured at the end
    of the run, when all batches have been generated. In other modes, all efficiencies of the trainer are multiplied by
    one factor, and all efficiencies of the engines by another factor."""
    terms, work, groups = _terms(rows), workload_of_run(run), recorded_groups(run)

    def setting(efficiency: Efficiency) -> Setting:
        source = RecipeSource(recipe, Efficiencies(by_gpu={gpu: efficiency}), work, gpu)
        return source.setting(SimulationOptions(recorded=groups))

    def simulated(efficiency: Efficiency) -> tuple[Result, RunRecord]:
        given = setting(efficiency)
        record = simulate(given, RunOptions(recipe.run.seed))
        return summarise(given, record, (num_warm(len(record.steps)), len(record.steps))), record

    first, _ = simulated(known)
    if recipe.rollout.mode == "async":
        given = setting(known)
        slower, beside = _train_factors(run, rows, given.train)
        # `given.train_slowdown` is `known.train_beside` times the slowdown if more threads run than there are cores
        update = {"train_beside": known.train_beside * beside / given.train_slowdown}
        known = scaled(known, gpu, 1 / slower, ("train",), ("train_overhead_s",)).model_copy(update=update)
        steps = [row for row in rows if "perf/step_time" in row]
        measured = _slot_rate([(row["tokens/generated"], row.get("perf/slot_seconds", 0.0)) for row in steps])
        for _ in range(ROUNDS if measured else 0):
            _, record = simulated(known)
            rate = _slot_rate([(step.counts.generated_tokens, step.counts.busy_slot_s) for step in record.steps])
            known = known.model_copy(update={"engine_beside": known.engine_beside * (rate / measured) ** DAMPING})
    else:
        known = scaled(known, gpu, first.train_s / terms["training"], ("train",), ("train_overhead_s",))
        told = first
        for _ in range(ROUNDS):
            known = scaled(known, gpu, told.generate_s / terms["generation"], DECODE_SHARES, DECODE_TIMES)
            told, _ = simulated(known)
    count = recipe.rollout.batch_groups * recipe.rollout.group_size
    mean = round(work.prompt.mean + work.output.mean)
    names = {"step": "step_s", "generation": "generate_s", "training": "train_s"}
    points = [
        Measurement(f"{term}_in_a_run", count, mean, terms[term], getattr(first, key)) for term, key in names.items()
    ]
    return known, points
