"""Export a checkpoint of a run as a model directory for other software: merged weights in one dtype, with a model card.

DIRECTORY/
  config.json  model.safetensors  generation_config.json    AutoModelForCausalLM.from_pretrained, vLLM, SGLang
  tokenizer.json  tokenizer_config.json  chat_template.jinja
  README.md  learning_curve.svg  recipe.toml                model card, learning curve, recipe of the run
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import baton
from baton.errors import UserError
from baton.files import atomic_directory, check_output_directory, writing
from baton.policy.load import EXPORT_DTYPES, dtype_of, save_merged
from baton.records.evaluation import shown_share
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.trainer.checkpoint import checkpoint_path, checkpoint_step, list_checkpoints, newest_intact_checkpoint

logger = logging.getLogger(__name__)
_PANEL = 360
"""Width of a panel of the learning curve, pixels."""
_CARD = """---
{head}
---
# {name}

{base}, trained with reinforcement learning by Baton (`baton-rl` {version}):
{steps} train steps of {algorithm} on the tasks {tasks}; {weights}, {dtype}. `recipe.toml` has all
settings.

![training reward and accuracy by train step](learning_curve.svg)

{results}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "."     # the directory of this file
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
```
"""


def export_run(run: Path, to: Path, *, step: int | None = None, dtype: str | None = None) -> Path:
    """Write the model of a run to the directory `to`, which must be empty or absent, and return `to`.

    `step`: train step of the checkpoint; by default, the newest intact checkpoint is exported. `dtype`: dtype of the
    weights; the default is the dtype of the model with which the run started. An adapter is merged into its base model.
    Raises UserError if the dtype is not allowed or the checkpoint does not exist.
    """
    opened = RunDirectory.open(run)
    checkpoint = _checkpoint(opened, step)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not an empty directory: export to another path, or remove it")
    check_output_directory(to)
    chosen = dtype or dtype_of(str(opened.recipe()["model"]["path"]))
    if chosen not in EXPORT_DTYPES:
        raise UserError(f"dtype: got {dtype!r}, allowed are {', '.join(EXPORT_DTYPES)}")
    with atomic_directory(to) as directory, writing(directory):
        save_merged(str(checkpoint), directory, chosen)
        shutil.copyfile(run / "recipe.toml", directory / "recipe.toml")
        number = checkpoint_step(checkpoint)
        (directory / "learning_curve.svg").write_text(learning_curve(opened, number), encoding="utf-8")
        (directory / "README.md").write_text(model_card(opened, number, chosen), encoding="utf-8")
        permissions = (directory / "recipe.toml").stat().st_mode
        for file in filter(Path.is_file, directory.rglob("*")):
            file.chmod(permissions)  # safetensors lets only the owner read a file, but servers run as other users
    return to


def _checkpoint(run: RunDirectory, step: int | None) -> Path:
    if step is None:
        found = newest_intact_checkpoint(run.checkpoints, logger.warning)
        if found is None:
            raise UserError(f"{run.path} has no complete checkpoint to export")
        return found
    known = list_checkpoints(run.checkpoints)
    if (path := checkpoint_path(run.checkpoints, step)) not in known:
        steps = ", ".join(str(checkpoint_step(each)) for each in known) or "none"
        raise UserError(f"{run.path} has no checkpoint of step {step}; there are: {steps}")
    return path


def model_card(run: RunDirectory, step: int, dtype: str) -> str:
    """Return the README.md of the exported checkpoint after train step `step`."""
    recipe = run.recipe()
    base, algorithm = str(recipe["model"]["path"]), str(recipe["algorithm"]["name"])
    is_on_hub = not Path(base).exists() and base.count("/") == 1
    place = Path(base).parents[1] if Path(base).parent.name == "checkpoints" else Path(base)  # a run, or a model
    head = ["library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"base_model: {json.dumps(base.partition('@')[0])}"] if is_on_hub else []
    head += [f"tags: {json.dumps(['baton', 'reinforcement-learning', algorithm])}"]
    return _CARD.format(
        head="\n".join(head),
        name=recipe["run"]["name"],
        base=f"`{base}`" if is_on_hub else f"`{place.name}`",
        version=baton.__version__,
        steps=step,
        algorithm=algorithm,
        tasks=", ".join(f"`{task['name']}`" for task in recipe["task"]),
        weights="a low-rank adapter, merged into the model" if "lora" in recipe else "all weights",
        dtype=dtype,
        results="\n".join(_results(run, step)),
    )


def _results(run: RunDirectory, step: int) -> Iterator[str]:
    """Yield the lines of a table of accuracy. Each task has a row for sampled and a row for greedy responses. The
    columns are the first and the last evaluated step."""
    evaluations = [each for each in run.evaluations() if each.step <= step]
    if not evaluations:
        yield "The run has no evaluation."
        return
    steps = list(dict.fromkeys((evaluations[0].step, evaluations[-1].step)))
    yield f"| accuracy, 95 % interval | {' | '.join(f'step {each}' for each in steps)} |"
    yield f"|---|{'---|' * len(steps)}"
    shares = {(e.step, e.result.task, e.result.way): shown_share(e.result.accuracy) for e in evaluations}
    for task, way in dict.fromkeys((task, way) for _, task, way in shares):
        cells = (shares.get((each, task, way), "") for each in steps)
        yield f"| {task.replace('|', '/')}, {way} | {' | '.join(cells)} |"


def learning_curve(run: RunDirectory, step: int) -> str:
    """Return an SVG with the training reward and the accuracy up to train step `step`."""
    rewards = [
        (row["step"], row["reward/mean"]) for row in read_metrics(run.path) if row.get("reward/mean") is not None
    ]
    sampled = [
        (each.step, each.result.task, 100 * each.result.accuracy.value)
        for each in run.evaluations()
        if each.result.temperature > 0 and each.result.accuracy is not None
    ]
    overall = sampled[-1][1] if sampled else ""  # "all" if the run has several tasks
    shares = [(evaluated, share) for evaluated, task, share in sampled if task == overall]
    panels = (("training reward, mean of the batch", rewards), ("accuracy, sampled responses, %", shares))
    drawn = [
        line
        for number, (title, points) in enumerate(panels)
        for line in _panel(title, [p for p in points if p[0] <= step], number * _PANEL)
    ]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _PANEL}" height="220" font-family="sans-serif"'
    return "\n".join(
        [f'{start} font-size="11">', '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>\n"]
    )


def _panel(title: str, points: Sequence[tuple[float, float]], left: int) -> Iterable[str]:
    """Draw one curve in an area of 300 × 150 pixels. The axes show the smallest and the largest value."""
    yield f'<text x="{left + 45}" y="18" font-size="13">{title}</text>'
    if not points:
        yield f'<text x="{left + 45}" y="100">no values</text>'
        return
    steps, values = zip(*points, strict=True)
    low, high, first, last = min(values), max(values), min(steps), max(steps)

    def place(step: float, value: float) -> str:
        across = (step - first) / (last - first) if last > first else 0.5
        up = (value - low) / (high - low) if high > low else 0.5
        return f"{left + 45 + 300 * across:.1f},{185 - 150 * up:.1f}"

    for value, y in ((high, 39), (low, 189)):
        yield f'<text x="{left + 40}" y="{y}" text-anchor="end">{value:.3g}</text>'
    for step, x, anchor in ((first, 45, "start"), (last, 345, "end")):
        yield f'<text x="{left + x}" y="205" text-anchor="{anchor}">step {step:g}</text>'
    yield f'<rect x="{left + 45}" y="35" width="300" height="150" fill="none" stroke="#ccc"/>'
    line = " ".join(place(*point) for point in points)
    yield f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.6"/>'
