"""From a response to a judgement: weighted reward parts, and accuracy beside them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import model_validator

from baton.errors import UserError
from baton.settings import Settings
from baton.tasks.answer import AnswerFormat, extract_answer, meets_format
from baton.tasks.task import Task
from baton.types import Judgement, Prompt

RewardFunction = Callable[[Prompt, str, str | None], float]
"""(prompt, response text, extracted answer or None) → value."""


class RewardSettings(Settings):
    """[[reward]] one part of the reward; the reward is the weighted sum of the parts."""

    kind: Literal["correct", "score", "exact", "format", "function"]
    """correct: 1 for a full score of the task's scorer, else 0. score: the scorer's value with its partial credit.
    exact: 1 when the answer equals the reference as text. format: 1 when the answer format is met.
    function: your own."""
    weight: float = 1.0
    """Factor of this part in the sum."""
    function: str | None = None
    """`module:name` of a function (prompt, response, answer) -> float, for kind = "function"."""

    @model_validator(mode="after")
    def _function_named(self) -> RewardSettings:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError('function = "module:name" belongs to kind = "function", and only to it')
        return self

    @property
    def name(self) -> str:
        """Name in metrics: the kind, or the function's own name."""
        return self.kind if self.function is None else self.function.rpartition(":")[2]


class Judge:
    """Judges responses of all tasks of a recipe."""

    def __init__(self, tasks: dict[str, Task], rewards: Sequence[RewardSettings], answer_format: AnswerFormat) -> None:
        """Import the reward functions. Raises UserError when one cannot be found, or no part is given."""
        if not rewards:
            raise UserError('the recipe has no [[reward]]: give at least one, such as kind = "correct"')
        names = [r.name for r in rewards]
        if len(set(names)) < len(names):
            raise UserError(f"[[reward]]: two parts have the same name, got {names}; each may appear once")
        self._tasks = tasks
        self._rewards = rewards
        self._format = answer_format
        self._functions = {r.name: _import_function(r.function) for r in rewards if r.function is not None}

    def judge(self, prompt: Prompt, response: str) -> Judgement:
        """Judge one finished response. Accuracy means a full score, whatever the reward parts give besides."""
        answer = extract_answer(response, self._format)
        score, failure = 0.0, None
        try:
            score = self._tasks[prompt.task].score(answer, prompt.answer, prompt.metadata)
        except Exception as error:  # noqa: BLE001 - an answer may break a verifier in any way
            failure = f"{type(error).__name__}: {error}"
        is_correct = score >= 1.0
        parts: dict[str, float] = {}
        for reward in self._rewards:
            match reward.kind:
                case "correct":
                    value = float(is_correct)
                case "score":
                    value = score
                case "exact":
                    value = float(answer is not None and answer == (prompt.answer or "").strip())
                case "format":
                    value = float(meets_format(response, self._format))
                case "function":
                    value = self._call(reward, prompt, response, answer)
            parts[reward.name] = value
        total = sum(r.weight * parts[r.name] for r in self._rewards)
        return Judgement(total, parts, is_correct, answer, failure)

    def _call(self, reward: RewardSettings, prompt: Prompt, response: str, answer: str | None) -> float:
        try:
            value = float(self._functions[reward.name](prompt, response, answer))
            if not math.isfinite(value):
                raise ValueError(f"it returned {value}")
            return value
        except Exception as error:
            raise UserError(
                f"reward function {reward.function!r} failed on a prompt of task {prompt.task!r} "
                f"({prompt.prompt_id}): {type(error).__name__}: {error}"
            ) from error


def _import_function(path: str | None) -> RewardFunction:
    module_name, _, name = (path or "").partition(":")
    if not module_name or not name:
        raise UserError(f"reward function: got {path!r}, allowed is 'module:name'")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"reward function {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise UserError(f"reward function {path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
