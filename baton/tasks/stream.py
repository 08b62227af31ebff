"""Weighted mixtures of tasks, dealt out as prompts: an endless training stream and a fixed held-out set."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from baton.errors import TaskExhausted, UserError
from baton.rewards.answer import INSTRUCTIONS, AnswerFormat
from baton.settings import Settings
from baton.tasks.dataset import FileTask
from baton.tasks.gym import GymTask
from baton.tasks.task import HELD_OUT_PERCENT, Problem, Task
from baton.types import Message, Prompt

PATIENCE = 2_000
"""Consecutive draws without a usable problem after which a task is exhausted."""


class TaskSettings(Settings):
    """[[task]] one source of problems."""

    name: str
    """Name in metrics and reports; also the reasoning-gym task unless `gym` or `path` says otherwise."""
    gym: str | None = None
    """reasoning-gym task; the default is `name`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str | None = None
    """Rows with a prompt and a reference answer, instead of a reasoning-gym task: a JSONL or parquet file, or a
    directory written by save_to_disk of Hugging Face datasets."""
    split: str = "train"
    """Split to read if the directory has several."""
    prompt_column: str = "prompt"
    """Column of `path` with the prompt, as text or as messages; a dot selects a nested column."""
    answer_column: str | None = None
    """Column of `path` with the reference answer; the default is the first usual name, such as `answer`, in a row."""
    answer_after: str | None = None
    """The reference answer is the text after this mark in its column, such as "####" in GSM8K."""
    scorer: Literal["number", "math", "none"] = "number"
    """Scorer of `path`. number: equal as text or as a number. math: equal by math-verify. none: rows need no reference
    answer, and only reward functions score."""
    form: Literal["original", "compact"] = "original"
    """Wording of the problem: reasoning-gym's own, or a compact one for small models."""
    too_long: Literal["filter", "refuse"] = "filter"
    """Prompts that leave no room for a response within engine.max_context_tokens. filter: skip and count them. refuse:
    do not start if any is found; one found only when it is drawn during the run is skipped."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this task in the training stream, relative to the others."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSettings:
        if self.path is not None and (self.gym is not None or self.params or self.form == "compact"):
            raise ValueError("path is a file of problems: gym, params and form = 'compact' do not apply to it")
        columns = ("split", "prompt_column", "answer_column", "answer_after", "scorer")
        given = [key for key in columns if getattr(self, key) != type(self).model_fields[key].default]
        if self.path is None and given:
            raise ValueError(f"{given[0]} tells how to read a path, and there is none")
        return self

    def build(self) -> Task:
        """Open the source. Raises UserError when it cannot deliver a problem."""
        if self.path is not None:
            return FileTask(
                self.name,
                self.path,
                split=self.split,
                prompt_column=self.prompt_column,
                answer_column=self.answer_column,
                answer_after=self.answer_after,
                scorer=self.scorer,
            )
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
        self.refuses_long = {s.name: s.too_long == "refuse" for s in settings}
        """Whether a task's prompts must all leave room for a response, by task."""
        self.has_room: Callable[[Prompt], bool] = lambda prompt: True
        """Whether a prompt may be used; see `limit`."""
        self._system = INSTRUCTIONS[answer.format] if answer.instruct else None

    def limit(self, num_tokens: Callable[[Sequence[Message]], int], most: int) -> None:
        """Leave out prompts of more tokens than `most`, from the training stream and from the held-out set."""
        self.has_room = lambda prompt: num_tokens(prompt.messages) <= most

    def prompt(self, task: str, problem: Problem) -> Prompt:
        """Word a problem as a prompt; a conversation is taken as it is."""
        if problem.messages is not None:
            return Prompt(
                problem.problem_id, task, problem.messages, problem.answer, problem.metadata, is_conversation=True
            )
        messages = () if self._system is None else (Message("system", self._system),)
        return Prompt(
            problem.problem_id,
            task,
            (*messages, Message("user", problem.question)),
            problem.answer,
            problem.metadata,
        )

    def held_out(self, num_prompts: int, seed: int = 0, *, or_fewer: bool = False) -> list[Prompt]:
        """Return distinct held-out prompts, shared among the tasks as evenly as possible: the same ones each time.

        Raises TaskExhausted when a task has fewer distinct held-out problems than its share; with `or_fewer` when it
        has none.
        """
        prompts: list[Prompt] = []
        seen: set[str] = set()
        for place, (name, task) in enumerate(self.tasks.items()):
            share = num_prompts // len(self.tasks) + (place < num_prompts % len(self.tasks))
            found, index, last_new = 0, 0, 0
            while found < share:
                problem = task.draw(seed, index)
                index += 1
                is_new = problem.is_held_out and problem.problem_id not in seen
                if is_new and self.has_room(prompt := self.prompt(name, problem)):
                    seen.add(problem.problem_id)
                    prompts.append(prompt)
                    found, last_new = found + 1, index
                elif index - last_new > PATIENCE:
                    if found and or_fewer:
                        break
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
        self._too_long = 0

    def take_counts(self) -> dict[str, float]:
        """Return how many prompts were left out because they are too long since the last call; nothing where none."""
        taken, self._too_long = self._too_long, 0
        return {"prompts/too_long": float(taken)} if taken else {}

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
            prompt = self._mixture.prompt(name, problem)
            has_room = problem.is_held_out or self._mixture.has_room(prompt)
            self._too_long += not has_room
            if problem.is_held_out or not has_room:
                misses += 1
            else:
                misses = 0
                prompts.append(prompt)
            if misses > PATIENCE:
                hint = "widen its params" if has_room else "its prompts are too long: raise engine.max_context_tokens"
                raise TaskExhausted(f"task {name!r} has no training problem in {PATIENCE} draws: {hint}")
        return prompts
