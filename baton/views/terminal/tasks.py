"""Print the tasks of reasoning-gym."""

from __future__ import annotations

from rich.text import Text

from baton.console import Console
from baton.tasks.gym import ListedTask


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
