"""Print the listings of `baton keys`, `baton tasks` and `baton algorithms`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from baton.console import Console
from baton.recipe.keys import LISTS, RecipeKey
from baton.recipe.presets import Algorithm
from baton.tasks.gym import HOW_TO_INSTALL, ListedTask, has_gym


def print_keys(console: Console, keys: Sequence[RecipeKey]) -> None:
    """Print keys by section."""
    section = None
    for key in keys:
        if key.section != section:
            section = key.section
            console.print(f"\n[{section}]" if section else "\ntop level", style="bold")
            if section.rpartition(".")[2] in LISTS:
                console.print(
                    f"  a list: [[{section}]] may appear several times; overrides number the entries from 0, such as "
                    f"{section}.0.{key.key}=…"
                )
        default = "required" if key.default is None else f"= {key.default}"
        console.print(f"  {key.key} {default}   ({key.type})")
        console.print(f"      {key.meaning}", style="dim")


def print_tasks(console: Console, tasks: list[ListedTask]) -> None:
    """Print a single task with its parameters, or a table of several tasks."""
    if len(tasks) == 1:
        task = tasks[0]
        console.print(task.name, style="bold")
        console.print(f"\nexample:\n{task.question}")
        console.print(f"\nanswer: {task.answer}")
        if task.compact is not None:
            console.print(f'with form = "compact": {task.compact}')
        console.print("\nparams and their defaults:")
        for key, value in task.params.items():
            console.print(f"  {key} = {value}")
        return
    width = max(len(task.name) for task in tasks) + 2
    for task in tasks:
        line = Text(f"{task.name:<{width}}", style="bold")
        line.append(" ".join(task.question.split()), style="not bold")
        line.truncate(console.width - 1, overflow="ellipsis")
        console.print(line)
    console.print("\nFor a task's parameters: baton tasks NAME")
    if not has_gym():
        console.print(f"reasoning-gym adds about a hundred tasks: {HOW_TO_INSTALL}")


def print_algorithms(console: Console, algorithms: Sequence[Algorithm]) -> None:
    """Print a table of several presets, or all keys of a single preset."""
    if len(algorithms) == 1:
        _print_one(console, algorithms[0])
        return
    headings = ("algorithm", "idea", "keys that differ from the defaults")
    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False, show_lines=True)
    for each in algorithms:
        values = {**each.sets, **{f"rollout.{key}": value for key, value in each.rollout.items()}}
        sets = "\n".join(f"{key} = {_toml(value)}" for key, value in values.items()) or "none"
        name = Text.assemble((each.name, "bold"), (f"\narXiv {each.paper}", "dim"))
        about = Text.assemble(each.idea, (f"\nupdates per batch: {each.updates}", "dim"))
        table.add_row(name, about, sets)
    console.print(table)
    console.print(
        'To use a preset: algorithm = "NAME" at the top of a recipe, or algorithm=NAME on the command line. Other keys '
        "of [algorithm] may be set too, such as algorithm.clip_high=0.3. All keys: baton algorithms NAME, "
        "baton keys algorithm. Formulas: docs/algorithms.md"
    )


def _print_one(console: Console, one: Algorithm) -> None:
    console.print(Text.assemble((one.name, "bold"), f" (arXiv {one.paper}): {one.idea}"))
    console.print(f"updates per batch in the paper: {one.updates}")
    for key, value in one.all.items():
        if key != "name" and value is not None:
            mark = "   # not the default" if key in one.sets else ""
            console.print(f"  {key} = {_toml(value)}{mark}")
    for key, value in one.rollout.items():
        console.print(f"  rollout.{key} = {_toml(value)}   # not the default")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value:g}"
