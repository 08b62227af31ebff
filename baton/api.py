"""The public Python API, which `import baton` provides (docs/api.md). The commands call it too."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import partial
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

import msgspec
import tomli_w
from pydantic import PrivateAttr

from baton.console import Console, out, say
from baton.errors import UserError
from baton.recipe.arguments import Reward, Rows, environment_section, reward_sections, task_section
from baton.recipe.changes import with_current_keys
from baton.recipe.load import parse_recipe, read_tree, set_key
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation
from baton.records.metrics import read_metrics
from baton.records.predictions import Predictions
from baton.records.run_directory import RunDirectory, Source, without_none
from baton.records.run_lock import RunLock
from baton.run.summary import RunReport, write_summary
from baton.specs.plan import Plan
from baton.stop import Stopped, StopRequest
from baton.views.terminal.progress import TerminalObserver
from baton.views.terminal.report import print_report

if TYPE_CHECKING:
    from baton.run.dry_run import Footprint
    from baton.run.loop import Loop, Observer
    from baton.run.trajectories import Sample

Status = Literal["running", "finished", "stopped", "failed"]
Start = Callable[["Observer", StopRequest], "Loop"]
"""Function that runs a recipe until the run is complete or a stop is requested, and returns the closed `Loop`."""


def train(
    model: str | Path,
    data: Rows | None,
    reward: Reward | Sequence[Reward] = "correct",
    *,
    eval_data: Rows | None = None,
    environment: str | type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    answer_format: str = "last_number",
    algorithm: str = "grpo",
    steps: int = 100,
    seed: int = 0,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a model with reinforcement learning, and return the run.

    The function prints progress, writes the run to `runs/<name>` and may be called in a script without a `__main__`
    guard, or in a notebook. After Ctrl-C, the run completes the current train step and writes a checkpoint; the
    function then raises KeyboardInterrupt.

    Args:
        model: directory of a Hugging Face causal LM, or its name on the hub.
        data: file or dataset by name, or rows with a prompt and a reference answer.
        reward: function, name of a reward, or a list of functions and names, whose values are added. A reward
            function receives its arguments by name: any of `prompt`, `response`, `parsed` (the answer in the response),
            `episode`, and the columns of the data (`answer` is the row's reference). It returns a number, a mapping of
            named parts, or None if it gives no reward. A function with a parameter `completions` is called as in TRL.
        eval_data: test set. By default, a tenth of `data` is the test set and is not trained on.
        environment: class of a multi-turn environment, or its name. The environment gives the reward, to which the
            values of reward functions are added. With an environment, `data` may be None.
        tools: functions that the policy may call in a multi-turn task. With tools, the reward function scores the last
            turn.
        answer_format: format in which responses state their answer.
        algorithm: name of an algorithm preset, such as "grpo" or "dapo".
        steps: number of train steps.
        seed: seed of the prompts and of the sampling noise.
        name: name of the run; the default is the model's name and the time.
        config: further keys of the recipe, such as `{"trainer.lr": 1e-6}`.
        callbacks: objects whose `on_step` is called after each train step.

    Raises UserError (a ValueError) for invalid arguments or data, before the run's directory is created.
    """
    directory = Path(str(model))
    of = directory.resolve().name if directory.is_dir() else str(model).rpartition("/")[2].partition("@")[0]
    plain = re.sub("[^A-Za-z0-9._-]+", "-", of).lstrip("._-") or "run"
    run = {"name": name or f"{plain}-{datetime.now().astimezone():%Y%m%d-%H%M%S}", "steps": steps, "seed": seed}
    tree = _tree(run, model, data, reward, answer_format, algorithm, config, eval_data, environment, tools)
    return TrainableRecipe.of(tree, "train").train(callbacks=callbacks)


def preview(
    model: str | Path,
    data: Rows | None,
    reward: Reward | Sequence[Reward] = "correct",
    *,
    n: int = 4,
    environment: str | type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    answer_format: str = "last_number",
    algorithm: str = "grpo",
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Sample and score four responses to each of `n` training prompts before any training, and return the responses.

    For each prompt, prints the responses with the highest and the lowest reward, with answers and reward parts. Then
    prints a warning for each problem: responses without answers, equal rewards, responses cut at the maximum length,
    prompts that are too long, too little memory. Writes no run. The other arguments are those of `train`.
    """
    from baton.run.preview import preview as make_preview
    from baton.views.terminal.trajectories import print_preview

    with TemporaryDirectory() as directory:
        run = {"name": "preview", "directory": directory, "seed": seed}
        tree = _tree(run, model, data, reward, answer_format, algorithm, config, None, environment, tools)
        found = make_preview(TrainableRecipe.of(tree, "preview"), n)
    print_preview(out, found)
    return [reading.shown for reading in found.responses]


def evaluate(
    model: str | Path | Run,
    data: Rows,
    reward: Reward | Sequence[Reward] = "correct",
    *,
    samples: int = 1,
    temperature: float = 0.0,
    answer_format: str = "last_number",
    config: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Generate `samples` responses to each row of the data, score them, and return accuracy and mean reward.

    If `model` is a run, its newest checkpoint is evaluated. With temperature 0, decoding is greedy. Prompts that are
    too long are not evaluated. Raises UserError if no response can be scored.
    """
    from baton.run.assemble import evaluate_recipe
    from baton.types import SamplingParams

    with TemporaryDirectory() as directory:
        path = model.path if isinstance(model, Run) else model
        run = {"name": "evaluate", "directory": directory}
        tree = _tree(run, path, None, reward, answer_format, "grpo", config, data)
        recipe = TrainableRecipe.of(tree, "evaluate")
        sampling = SamplingParams(0, temperature)
        (result,) = evaluate_recipe(recipe, recipe.model.path, sampling, samples=samples)
    return result


def _tree(
    run: Mapping[str, Any],
    model: str | Path,
    data: Rows | None,
    reward: Reward | Sequence[Reward],
    answer_format: str,
    algorithm: str,
    config: Mapping[str, Any] | None,
    eval_data: Rows | None = None,
    environment: str | type | None = None,
    tools: Sequence[Callable[..., Any]] = (),
) -> dict[str, Any]:
    """Return the recipe sections that these arguments describe.

    Keys in `config` override the other arguments. run: the keys of [run].
    """
    changes: Any = {} if config is None else config
    if not isinstance(changes, Mapping):
        raise UserError(f"config: got {changes!r}, allowed is a dict of keys and values")
    own = changes.get("run")
    own = {**run, **own} if isinstance(own, Mapping) else run
    directory = Path(changes.get("run.directory", own.get("directory", "runs"))) / ".data"
    played = environment_section(environment, tools, reward)
    rewards = reward_sections("correct" if tools else reward)
    tests = [] if eval_data is None else [task_section(eval_data, rewards, directory, played)]
    if data is not None:
        task = task_section(data, rewards, directory, played)
        tests = [{**test, "name": f"{test['name']}_test"} if test["name"] == task["name"] else test for test in tests]
        tasks = [{**task, "held_out": "none"} if tests and not played else task]
    elif played or tests:
        tasks = [{"name": "episodes", **played}] if played else []
    else:
        raise UserError(
            "data: got None, but without an environment the problems come from data; pass data or environment"
        )
    tree = {
        "run": dict(run),
        "model": {"path": str(model)},
        "task": tasks,
        "eval": {"task": tests},
        "answer": {"format": answer_format},
        "reward": rewards,
        "algorithm": algorithm,
    }
    for key, value in changes.items():
        # a section given as a dict changes only the keys of the dict
        section: Any = tree.get(key)
        if key == "algorithm" and isinstance(section, str):
            section = {"name": section}
        is_section = isinstance(section, dict) and isinstance(value, Mapping)
        set_key(tree, key, {**section, **value} if is_section else value)
    return tree


class TrainableRecipe(Recipe):
    """A recipe: all settings of a run. `baton.Recipe` is this class.

    Recipes are immutable; `override` returns a changed copy.
    """

    _tree: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, tree: dict[str, Any], where: str) -> Self:
        """Return the recipe with these sections. Raises UserError: a line per mistake, which begins with `where`."""
        recipe = parse_recipe(cls, tree, where)
        recipe._tree = tree
        return recipe

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a recipe file. Raises UserError with a line per mistake."""
        return cls.of(read_tree(Path(path)), str(path))

    def override(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy of the recipe in which the given keys have new values, such as `{"trainer.lr": 1e-6}`. A
        section that is given as a dict replaces the whole section."""
        tree = deepcopy(self._tree)
        for key, value in changes.items():
            set_key(tree, key, value)
        return self.of(tree, "override")

    def to_toml(self) -> str:
        """Return the resolved recipe with all keys as TOML."""
        return tomli_w.dumps(without_none(self.model_dump(mode="json")))

    def check(self) -> Footprint:
        """Check data, model and memory without starting the run, and return the memory estimate. Raises UserError if
        the run would not start."""
        from baton.run.dry_run import footprint

        return footprint(self)

    def train(self, *, callbacks: Sequence[Callback] = ()) -> Run:
        """Train, as `baton.train` does."""
        return self._train(callbacks, resume=False)

    def resume(self, *, callbacks: Sequence[Callback] = ()) -> Run:
        """Continue the run of this recipe from its latest checkpoint."""
        return self._train(callbacks, resume=True)

    def _train(self, callbacks: Sequence[Callback], *, resume: bool) -> Run:
        from baton.run.assemble import train_here

        _check_callbacks(callbacks)
        path, stop = self.run.path, StopRequest(say)
        start = partial(train_here, self, resume=resume, overwrite=False, predictions=predictions_for(self))
        try:
            report = execute(start, stop, out, self, callbacks)
        except Stopped:
            stopped = "stopped before the first train step"
        else:
            print_report(out, report)
            run = Run(path)
            if run.status != "stopped" or stop.signal not in (signal.SIGINT, signal.SIGTERM):
                return run
            stopped = f"stopped after step {report.steps}; baton.Run({str(path)!r}).resume() continues"
        if stop.signal == signal.SIGTERM:
            sys.exit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(stopped)


def predictions_for(recipe: Recipe, plan: Plan | None = None, source: str = "") -> Predictions | None:
    """Return the predictions for a run of the recipe on this machine. If a plan is given, its predictions are used.

    Without a plan, they come from a simulation with `fleet.calibration` and `fleet.workload`. The simulation is not
    possible if one of these keys is not set or if a task is multi-turn; the function then returns None.
    """
    from baton.run.dry_run import trainer_bytes
    from baton.run.predictions import predictions_of_plan
    from baton.simulator.predictions import simulated_predictions

    if plan is not None:
        return predictions_of_plan(plan, source, trainer_bytes(recipe, is_here=True))
    calibration, workload = recipe.fleet.calibration, recipe.fleet.workload
    if calibration is None or workload is None or recipe.multi_turn_task is not None:
        return None
    return simulated_predictions(recipe, Path(calibration), Path(workload), trainer_bytes(recipe, is_here=True))


def execute(
    start: Start, stop: StopRequest, console: Console, recipe: Recipe, callbacks: Sequence[Callback] = ()
) -> RunReport:
    """Call `start`, which returns when the run is complete or a stop was requested, and print the progress.

    Write the run's report and return it. Raises Stopped if a stop was requested before the run had a directory.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _CallbackObserver(console, recipe, callbacks, stop) as observer, stop:
        loop = start(observer, stop)
    return write_summary(loop.run)


class Callback(Protocol):
    """Receives the metrics of a run after each train step."""

    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Return True to stop the run, as Ctrl-C does, but without an exception."""


def _check_callbacks(callbacks: Any) -> None:
    """Raise UserError if `callbacks` is not a list of objects with a method `on_step`."""
    are_objects = isinstance(callbacks, Sequence) and not any(isinstance(one, type) for one in callbacks)
    if not are_objects or not all(callable(getattr(one, "on_step", None)) for one in callbacks):
        raise UserError(f"callbacks: got {callbacks!r}, allowed is a list of objects with a method on_step")


class _CallbackObserver(TerminalObserver):
    """Prints progress and calls the callbacks."""

    def __init__(self, console: Console, recipe: Recipe, callbacks: Sequence[Callback], stop: StopRequest) -> None:
        super().__init__(console, recipe.run.steps)
        self._callbacks, self._path, self._stop = callbacks, recipe.run.path, stop

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        super().stepped(step, metrics)
        answers = [callback.on_step(Run(self._path), step, dict(metrics)) for callback in self._callbacks]
        if any(answers) and not self._stop.is_requested:
            self._stop.request(0)


class Run:
    """A finished or unfinished run, opened by its directory.

    Each value is read from the run's files when it is requested.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a run's directory. Raises UserError if `path` is not the directory of a run."""
        self.path = Path(path)
        self._directory = RunDirectory.open(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def recipe(self) -> TrainableRecipe:
        """The resolved recipe with which the run started or was last resumed."""
        return TrainableRecipe.of(with_current_keys(self._directory.recipe()), f"{self.path}/recipe.toml")

    @property
    def status(self) -> Status:
        """Status of the run. `running`: a process trains. `stopped`: the run can be resumed. `failed`: the run ended
        with an error, or its process was killed."""
        found = RunLock.status(self.path)
        if not found:  # a run of an earlier version of Baton, which stored no status
            done = max((row["step"] for row in read_metrics(self.path)), default=0)
            found = "finished" if done >= self._directory.recipe()["run"]["steps"] else "stopped"
        return cast(Status, found)

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each step, evaluations included, in order. docs/metrics.md describes the names."""
        rows: dict[int, dict[str, float]] = {}
        for row in read_metrics(self.path):
            values = {name: nan if value is None else value for name, value in row.items()}
            rows.setdefault(row["step"], {}).update(values)
        return [rows[step] for step in sorted(rows)]

    def samples(self, step: int, source: Source = "batch") -> Iterator[Sample]:
        """Yield recorded trajectories of a train step.

        Raises UserError if the step is not recorded; the message names the recorded steps. source: `batch` selects the
        trained batch; `evaluation` and `greedy` select the sampled and the greedy responses of the evaluation after the
        step; `skipped` selects the batch that `baton train --skip-batch` removed.
        """
        from baton.run.trajectories import read_trajectories

        for reading in read_trajectories(self.path, step, limit=sys.maxsize, source=source):
            yield reading.shown

    def evaluations(self) -> list[Evaluation]:
        """Return the results of all evaluations in order. `step` is the train step after which an evaluation ran."""
        return [msgspec.structs.replace(each.result, step=each.step) for each in self._directory.evaluations()]

    def resume(self, changes: Mapping[str, Any] | None = None, *, callbacks: Sequence[Callback] = ()) -> Run:
        """Continue the run from its latest checkpoint, with the given keys of the recipe changed.

        Raises UserError if a key must not change; the message names the keys that may change. If the reward is a
        function of a script, the script must define it again under the same name.
        """
        place = {"run.directory": str(self.path.parent), "run.name": self.path.name}
        return self.recipe.override({**place, **(changes or {})}).resume(callbacks=callbacks)

    def export(self, to: str | Path, *, step: int | None = None, dtype: str | None = None) -> Path:
        """Write the merged model as a Hugging Face directory with tokenizer, generation config and model card.

        to: directory, which must be empty or absent. step: the checkpoint's train step; default: the newest. dtype:
        float32, bfloat16 or float16; default: the dtype of the model with which the run started.
        """
        from baton.run.export import export_run

        return export_run(self.path, Path(to), step=step, dtype=dtype)

    def report(self) -> Path:
        """Write a page with curves and examples to the run's directory, and return its path.

        If a package of `pip install 'baton-rl[report]'` is missing, prints the summary and returns the path of
        report.json.
        """
        from baton.views.pages.report import write_page

        page = self.path / "report.html"
        try:
            write_page(self._directory, page)
        except UserError as error:
            say(f"{error}; the summary is printed instead")
            print_report(out, write_summary(self._directory))
            return self.path / "report.json"
        return page
