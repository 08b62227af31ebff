"""`baton tasks`: what reasoning-gym offers, with examples."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec
from rich.text import Text

from baton.console import Console
from baton.errors import UserError
from baton.tasks.compact import COMPACT_FORMS
from baton.tasks.gym import GymTask, gym_tasks


class ListedTask(msgspec.Struct, frozen=True):
    """One task with an example."""

    name: str
    question: str
    answer: str | None
    compact: str | None
    """The same example in the compact form, where there is one."""
    params: dict[str, Any]
    """Parameters with their defaults."""


def list_tasks(name: str | None = None) -> list[ListedTask]:
    """Describe one task or all; a task whose parts are not installed says so in place of its example."""
    return [_describe(each) for each in ([name] if name else gym_tasks())]


def print_tasks(console: Console, tasks: list[ListedTask]) -> None:
    """Print one task at length, or many as a table."""
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
    console.print("\nbaton tasks NAME shows one at length, with its params")


def _describe(name: str) -> ListedTask:
    try:
        task = GymTask(name, name, {}, is_compact=False)
        problem = task.draw(0, 0)
        compact = GymTask(name, name, {}, is_compact=True).draw(0, 0).question if name in COMPACT_FORMS else None
    except UserError as error:
        if name not in gym_tasks():
            raise
        return ListedTask(name, str(error), None, None, _defaults(name))
    return ListedTask(name, problem.question, problem.answer, compact, _defaults(name))


def _defaults(name: str) -> dict[str, Any]:
    config = importlib.import_module("reasoning_gym.factory").DATASETS[name][1]()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        key: str(value) if not isinstance(value, (int, float, str, bool)) else value
        for key, value in values.items()
        if key not in ("seed", "size")
    }
