"""The tasks that reasoning-gym offers, with examples."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec

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
