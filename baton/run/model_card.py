"""The model card of an exported model: Markdown with metadata for the Hugging Face hub, and the learning curve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import baton
from baton.records.evaluation import shown_share
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory

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
