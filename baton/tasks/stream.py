"""Weighted mixtures of tasks, dealt out as prompts: an endless training stream and a fixed held-out set."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from baton.errors import TaskExhausted, UserError
from baton.settings import Settings
from baton.tasks.answer import INSTRUCTIONS, AnswerFormat
from baton.tasks.dataset import FileTask
from baton.tasks.gym import GymTask
from baton.tasks.task import HELD_OUT_PERCENT, Problem, Task
from baton.types import Message, Prompt

PATIENCE = 2_000
"""Draws in a row without a usable problem after which a task counts as exhausted."""


class TaskSettings(Settings):
    """[[task]] one source of problems."""

    name: str
    """Name in metrics and reports; also the reasoning-gym task unless `gym` or `path` says otherwise."""
    gym: str | None = None
    """reasoning-gym task; the default is `name`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str | None = None
    """JSONL file with `prompt` and `answer` in each row, in place of a reasoning-gym task."""
    form: Literal["original", "compact"] = "original"
    """Wording of the problem: reasoning-gym's own, or a compact one for small models."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this task in the training stream, relative to the others."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSettings:
        if self.path is not None and (self.gym is not None or self.params or self.form == "compact"):
            raise ValueError("path is a file of problems: gym, params and form = 'compact' do not apply to it")
        return self

    def build(self) -> Task:
        """Open the source. Raises UserError when it cannot deliver a problem."""
        if self.path is not None:
            return FileTask(self.name, self.path)
        return GymTask(self.name, self.gym or self.name, self.params, is_compact=self.form == "compact")


class AnswerSettings(Settings):
    """[answer] how a response states its answer."""

    format: AnswerFormat = "tags"
    """`tags`, `boxed` or `last_line`; see docs/tasks.md."""
    instruct: bool = True
    """Whether prompts begin with a system message that asks for the format."""


class TaskMixture:
    """All tasks of a recipe, by name."""

    def __init__(self, settings: Sequence[TaskSettings], answer: AnswerSettings) -> None:
        """Open every task. Raises UserError for an empty mixture or two tasks of one name."""
        if not settings:
            raise UserError("the recipe has no [[task]]: name at least one")
        names = [s.name for s in settings]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise UserError(f"[[task]]: the name {min(twice)!r} is used twice; give each task its own name")
        self.tasks: dict[str, Task] = {s.name: s.build() for s in settings}
        self.weights = [s.weight for s in settings]
        self._system = INSTRUCTIONS[answer.format] if answer.instruct else None

    def prompt(self, task: str, problem: Problem) -> Prompt:
        """Word a problem as a prompt."""
        messages = () if self._system is None else (Message("system", self._system),)
        return Prompt(
            problem.problem_id,
            task,
            (*messages, Message("user", problem.question)),
            problem.answer,
            problem.metadata,
        )

    def held_out(self, num_prompts: int, seed: int = 0) -> list[Prompt]:
        """Return distinct held-out prompts, shared among the tasks as evenly as possible: the same ones each time.

        Raises TaskExhausted when a task has fewer distinct held-out problems than its share.
        """
        prompts: list[Prompt] = []
        seen: set[str] = set()
        for place, (name, task) in enumerate(self.tasks.items()):
            share = num_prompts // len(self.tasks) + (place < num_prompts % len(self.tasks))
            found, index, last_new = 0, 0, 0
            while found < share:
                problem = task.draw(seed, index)
                index += 1
                if problem.is_held_out and problem.problem_id not in seen:
                    seen.add(problem.problem_id)
                    prompts.append(self.prompt(name, problem))
                    found, last_new = found + 1, index
                elif index - last_new > PATIENCE:
                    raise TaskExhausted(
                        f"task {name!r} has only {found} distinct held-out problems ({HELD_OUT_PERCENT} % of all), "
                        f"but {share} were asked for: ask for fewer, or widen its params"
                    )
        return prompts


class PromptStream:
    """The endless training stream of a mixture. Its whole state is the number of draws made from each task."""

    def __init__(self, mixture: TaskMixture, seed: int, start: Mapping[str, int] | None = None) -> None:
        """`start` is a former `position`, to continue from there."""
        self._mixture = mixture
        self._seed = seed
        self.position = {name: (start or {}).get(name, 0) for name in mixture.tasks}
        """Task name → draws made, held-out ones included."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, none of them held out. Raises TaskExhausted when a task has no such problem."""
        names = list(self._mixture.tasks)
        prompts: list[Prompt] = []
        misses = 0
        while len(prompts) < num_prompts:
            dice = random.Random(f"{self._seed}:{sum(self.position.values())}")
            name = dice.choices(names, self._mixture.weights)[0]
            problem = self._mixture.tasks[name].draw(self._seed, self.position[name])
            self.position[name] += 1
            if problem.is_held_out:
                misses += 1
            else:
                misses = 0
                prompts.append(self._mixture.prompt(name, problem))
            if misses > PATIENCE:
                raise TaskExhausted(f"task {name!r} has no training problem in {PATIENCE} draws: widen its params")
        return prompts
