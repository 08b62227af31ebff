"""Prompts from a weighted mixture of tasks: an endless training stream and a fixed held-out set."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field, model_validator

from baton.environments.calls import EnvironmentSpec, ToolFormat
from baton.environments.settings import EnvironmentSettings
from baton.errors import TaskExhausted, UserError
from baton.rewards.answer import INSTRUCTIONS
from baton.rewards.settings import AnswerSettings
from baton.settings import Settings
from baton.tasks.dataset import FileTask
from baton.tasks.environment import SHIPPED, EnvironmentTask, import_path
from baton.tasks.gym import GymTask
from baton.tasks.problem import HELD_OUT_PERCENT, Problem
from baton.tasks.rows import read_rows
from baton.types import Message, Prompt

Task = FileTask | GymTask | EnvironmentTask
"""A source of problems. `draw(seed, index)` returns the problem at position `index` of the stream with this seed. The
same arguments return the same problem. Two positions may have the same problem."""
TOOLS = "baton.environments.tools:ToolEnvironment"
MAX_MISSES = 2_000
"""A task counts as exhausted after this number of consecutive draws without a usable problem."""
_CANONICAL = ", or give the environment a method `canonical` if different problems have equal first observations"
"""Advice for an environment with too few problems."""


class ProblemSettings(Settings):
    """A source of problems: the keys that [[task]] and [[eval.task]] have in common."""

    name: str
    """Name in metrics and reports; also the reasoning-gym task, if `gym`, `path` and `environment` are not set."""
    gym: str | None = None
    """reasoning-gym task; the default is `name`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str | None = None
    """Dataset to use instead of a reasoning-gym task: a JSONL or parquet file, a directory written by save_to_disk of
    Hugging Face datasets, or the name of a dataset on the Hugging Face hub, such as `openai/gsm8k` or
    `openai/gsm8k@REVISION`. Each row has a prompt and a reference answer."""
    config: str | None = None
    """Configuration of a dataset on the hub; the default is the dataset's default configuration, or `main` if it has
    none."""
    split: str = "train"
    """Split to read, if `path` is a directory or a hub name with several splits."""
    prompt_column: str = "prompt"
    """Column of `path` with the prompt, as text or as messages; a dot selects a nested column. If the default column is
    missing, the first usual column such as `question` is used."""
    answer_column: str | None = None
    """Column of `path` with the reference answer. Default: the first column with a usual name such as `answer`."""
    answer_after: str | None = None
    """Mark in the answer column: the reference answer is the text after the mark. By default, the last line of a
    reference is used if it begins with "####", as in GSM8K."""
    scorer: Literal["number", "math", "letter", "none"] = "number"
    """How answers are scored if the task has a `path`. number: 1 if the answer equals the reference as text or as a
    number. math: 1 if math-verify finds them equal. letter: 1 if the answer is the letter of the correct choice, listed
    from the column `choices` or `options`. none: only reward functions score; rows need no reference."""
    answer: AnswerSettings | None = None
    """Answer format of this task, such as `{ format = "letter" }`; the default is [answer]."""
    environment: str | None = None
    """Environment of a multi-turn task: the name of a shipped environment such as "sokoban", or `module:Class`, or
    `file.py:Class`. `params` are the arguments of the class; the columns of a `path` are arguments of `reset`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call in a multi-turn task, as `module:function` or `file.py:function`. They replace
    `environment`. `params.reward` names a function that scores the last turn. A row's `prompt` is the first
    observation."""
    max_turns: int = Field(default=10, ge=1)
    """For multi-turn tasks: maximum number of turns of an episode."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """For multi-turn tasks: maximum number of tokens that the policy generates in one turn. The default is
    rollout.max_new_tokens, which also limits the whole episode."""
    max_observation_tokens: int = Field(default=1024, ge=1)
    """For multi-turn tasks: maximum number of tokens of an observation; longer observations are truncated."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """For multi-turn tasks: discount factor γ per turn. The episode's reward is Σ γ^t r_t over its turns t = 0, 1, …"""
    form: Literal["original", "compact"] = "original"
    """Wording of the problem. original: the wording of reasoning-gym. compact: few tokens, for small models."""
    too_long: Literal["filter", "refuse"] = "filter"
    """Treatment of prompts that leave no room for a response within engine.max_context_tokens. filter: skip and count
    these prompts. refuse: the run does not start if the check before the start finds such a prompt, and skips prompts
    that this check misses."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a prompt. Has an effect only below the limit that engine.max_context_tokens sets.
    `too_long` states how longer prompts are treated."""

    @model_validator(mode="before")
    @classmethod
    def _of_objects(cls, given: Any) -> Any:
        """Replace classes and functions by their import paths. For `tools`, set `environment`."""
        if not isinstance(given, dict):
            return given
        found = {key: import_path(value) for key, value in given.items()}
        if isinstance(found.get("params"), dict):
            found["params"] = {key: import_path(value) for key, value in found["params"].items()}
        if isinstance(found.get("tools"), (list, tuple)) and found["tools"]:
            found["tools"] = [import_path(one) for one in found["tools"]]
            found["environment"] = found.get("environment") or TOOLS
        return found

    @model_validator(mode="after")
    def _one_source(self) -> ProblemSettings:
        if self.environment is not None:
            return self._of_an_environment()
        if self.path is not None and (self.gym is not None or self.params or self.form == "compact"):
            raise ValueError("path is a file of problems: remove gym, params and form = 'compact', which do not apply")
        columns = ("config", "split", "prompt_column", "answer_column", "answer_after", "scorer")
        if self.path is None and (key := self.first_given(*columns)):
            raise ValueError(f"{key} applies only to a task with a path: set path, or remove {key}")
        if key := self.first_given("max_turns", "max_turn_tokens", "max_observation_tokens", "discount"):
            raise ValueError(f"{key} applies only to a multi-turn task: set environment, or remove {key}")
        return self

    def _of_an_environment(self) -> ProblemSettings:
        if key := self.first_given("gym", "form", "prompt_column", "answer_column", "answer_after", "scorer", "answer"):
            raise ValueError(f"{key} does not apply to a task with an environment, which gives prompts and rewards")
        if self.tools and self.environment != TOOLS:
            raise ValueError("tools make an environment: remove environment, or remove tools")
        if self.tools and "reward" not in self.params:
            raise ValueError("tools need params.reward, the import path of a function that scores the last turn")
        return self

    def build(self, environments: EnvironmentSettings | None = None, tool_format: ToolFormat | None = None) -> Task:
        """Open the source of problems. Raises UserError if the source cannot provide a problem. `tool_format`: how the
        model's chat template writes tool definitions."""
        if self.environment is not None:
            rows = [] if self.path is None else read_rows(f"task {self.name!r}", self.path, self.split, self.config)
            args = {**self.params, "tools": list(self.tools)} if self.tools else self.params
            path = SHIPPED.get(self.environment, self.environment)
            spec = EnvironmentSpec(self.name, path, args, tool_format=tool_format, max_turns=self.max_turns)
            return EnvironmentTask(spec, environments or EnvironmentSettings(), [row for _, row in rows])
        if self.path is not None:
            keys = ("split", "config", "prompt_column", "answer_column", "answer_after", "scorer")
            return FileTask(self.name, self.path, **{key: getattr(self, key) for key in keys})
        return GymTask(self.name, self.gym or self.name, self.params, is_compact=self.form == "compact")


class TaskSettings(ProblemSettings):
    """[[task]] One source of problems to train on."""

    held_out: Literal["hash", "none"] = "hash"
    """hash: a hash selects a tenth of the problems, which are not trained on. none: the run trains on all problems of
    `path`, except those of an [[eval.task]]."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this task in the training stream, relative to the weights of the other tasks."""

    @model_validator(mode="after")
    def _may_train_all(self) -> TaskSettings:
        if self.held_out == "none" and (self.path is None or self.environment is not None):
            raise ValueError('held_out: got "none", which applies only to a task with a path and without environment')
        return self


class EvalTaskSettings(ProblemSettings):
    """[[eval.task]] One test set. If a recipe has test sets, evaluations use them instead of the held-out problems of
    [[task]]. Problems of a test set are never trained on."""

    split: str = "auto"
    """Split to read, if `path` is a directory or a hub name with several splits. auto: `test`, or the only split."""
    held_out: Literal["all", "hash"] = "all"
    """all: all rows of `path` are test problems. hash: only the problems that the held-out hash selects, about a tenth,
    are test problems; a [[task]] with the same problems does not train on these. Without `path`, hash applies."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Maximum number of problems. The default is all rows of `path`. Without `path`, or with held_out = "hash", the
    default is eval.num_prompts."""
    samples: int | None = Field(default=None, ge=1)
    """Number of sampled responses per prompt; the default is eval.samples."""

    @property
    def uses_all(self) -> bool:
        return self.held_out == "all" and self.path is not None


class TaskMixture:
    """All tasks of a recipe with their weights, and the recipe's test sets."""

    def __init__(
        self,
        settings: Sequence[TaskSettings],
        answer: AnswerSettings,
        environments: EnvironmentSettings | None = None,
        tests: Sequence[EvalTaskSettings] = (),
        tool_format: ToolFormat | None = None,
    ) -> None:
        """Open every task and test set. `tool_format`: how the model's chat template writes tool definitions. Raises
        UserError for an empty mixture or two tasks with the same name."""
        if not (settings or tests):
            raise UserError("the recipe has no [[task]]: add at least one")
        every: list[ProblemSettings] = [*settings, *tests]
        names = [s.name for s in every]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(
                f"[[task]] and [[eval.task]]: the name {min(twice)!r} is used twice; give each task its own name"
            )
        self.tasks: dict[str, Task] = {s.name: s.build(environments, tool_format) for s in settings}
        self.tests: dict[str, Task] = {s.name: s.build(environments, tool_format) for s in tests}
        """Test sets. Without test sets, evaluations use the held-out problems of `tasks`."""
        self.weights = [s.weight for s in settings]
        self.settings = {s.name: s for s in every}
        self.max_tokens: dict[str, int] = {}
        """Task name → maximum number of tokens of its prompts; empty until the method `limit` sets the maxima."""
        self.answers = {s.name: s.answer or answer for s in every}
        """Task name → answer format."""
        self.samples = {s.name: s.samples for s in tests if s.samples is not None}
        """Test set → number of sampled responses per prompt, if its [[eval.task]] states this number."""
        self.has_room: Callable[[Prompt], bool] = lambda prompt: True
        """Function that returns whether a prompt leaves room for a response; the method `limit` sets this function."""
        self._trains_all = {s.name for s in settings if s.held_out == "none"}
        self._tests = {s.name: s for s in tests}
        self._tested = {
            problem.problem_id
            for name, task in self.tests.items()
            if isinstance(task, FileTask)
            for problem in task.rows
            if self.evaluates(name, problem)
        }
        trained = {task.spec.path for task in self.tasks.values() if isinstance(task, EnvironmentTask)}
        self._undrawn: dict[str, int] = {
            name: 0
            for name, task in self.tests.items()
            if isinstance(task, EnvironmentTask) and self._tests[name].uses_all and task.spec.path in trained
        }
        """Test set of an environment that is also trained on → number of its rows that have been drawn. The problems of
        the other rows are not in `_tested` yet."""

    @property
    def scored_tasks(self) -> dict[str, FileTask | GymTask]:
        """Name → task, for the tasks and test sets that reward scorers score: all except multi-turn tasks."""
        every = {**self.tasks, **self.tests}
        return {name: task for name, task in every.items() if not isinstance(task, EnvironmentTask)}

    def close(self) -> None:
        """End the processes that draw problems. May be called twice; a later draw starts them again."""
        for task in self._environment_tasks():
            task.close()

    def stop_draws(self, check: Callable[[], None]) -> None:
        """Call `check` about once a second while an environment draws a problem. An error of `check` ends the draw."""
        for task in self._environment_tasks():
            task.check_stop = check

    def _environment_tasks(self) -> list[EnvironmentTask]:
        return [task for task in (*self.tasks.values(), *self.tests.values()) if isinstance(task, EnvironmentTask)]

    def limit(self, num_tokens: Callable[[Prompt], int], max_tokens: int) -> None:
        """Skip prompts with more than `max_tokens` tokens, or with more than their task's `max_prompt_tokens`, in the
        training stream and in the held-out set."""
        self.max_tokens = {s.name: min(max_tokens, s.max_prompt_tokens or max_tokens) for s in self.settings.values()}
        self.has_room = lambda prompt: num_tokens(prompt) <= self.max_tokens[prompt.task]

    def trains_on(self, name: str, problem: Problem) -> bool:
        """Return whether a problem of a task is trained on: it is neither held out nor in a test set. The first call
        for an environment's problem draws the rows of the environment's test sets that evaluations have not drawn."""
        if isinstance(self.tasks.get(name), EnvironmentTask):
            self._draw_tests()
        return problem.problem_id not in self._tested and (name in self._trains_all or not problem.is_held_out)

    def _draw_tests(self) -> None:
        while self._undrawn:
            name, begin = next(iter(self._undrawn.items()))
            test = self.tests[name]
            assert isinstance(test, EnvironmentTask)
            for index in range(begin, len(test.rows)):
                with suppress(UserError):  # training cannot draw such a problem either
                    self._tested.add(test.draw(0, index).problem_id)
                self._undrawn[name] = index + 1
            del self._undrawn[name]

    def evaluates(self, name: str, problem: Problem) -> bool:
        """Return whether evaluations use a problem of a task or test set."""
        if name in self._tests and self._tests[name].uses_all:
            return True
        return problem.is_held_out and name not in self._trains_all

    def prompt(self, task: str, problem: Problem) -> Prompt:
        """Return the prompt of a problem. The messages of a conversation are used unchanged."""
        answer = self.answers[task]
        text = INSTRUCTIONS.get(answer.format) if answer.instruct else None
        system = () if text is None else (Message("system", text),)
        messages = problem.messages or (*system, Message("user", problem.question))
        is_conversation = problem.messages is not None
        return Prompt(problem.problem_id, task, messages, problem.answer, problem.metadata, is_conversation)

    def held_out(self, num_prompts: int, *, or_fewer: bool = False) -> list[Prompt]:
        """Return distinct held-out prompts in equal shares from all tasks; if there are test sets, return their prompts
        instead. Every call returns the same prompts.

        The key `num_prompts` of [[eval.task]] states how many prompts a test set gives. By default, a test set with
        `uses_all` gives all rows of its `path`, and any other test set as many prompts as the argument `num_prompts`.
        Without `or_fewer`, no test set gives more than this argument. Raises TaskExhausted if a task has fewer distinct
        held-out problems than its share. With `or_fewer`, and for test sets, the error is raised only if no held-out
        problem is found.
        """
        prompts: list[Prompt] = []
        if self.tests:
            for name, task in self.tests.items():
                own = self._tests[name]
                rows = len(task.rows) if own.uses_all and isinstance(task, FileTask | EnvironmentTask) else num_prompts
                share = own.num_prompts or rows
                found = self._distinct(name, task, share if or_fewer else min(share, num_prompts), set(), or_fewer=True)
                self._tested.update(prompt.prompt_id for prompt in found)
                if isinstance(task, EnvironmentTask) and len(found) == 1 < min(share, rows):
                    self._check_distinct(name, task)
                prompts += found
            return prompts
        seen: set[str] = set()
        for number, (name, task) in enumerate(self.tasks.items()):
            share = num_prompts // len(self.tasks) + (number < num_prompts % len(self.tasks))
            prompts += self._distinct(name, task, share, seen, or_fewer=or_fewer)
        return prompts

    def _check_distinct(self, name: str, test: EnvironmentTask) -> None:
        """Raise UserError if all rows of a test set are one problem."""
        if len({test.draw(0, index).problem_id for index in range(len(test.rows))}) == 1:
            raise UserError(
                f"test set {name!r}: its {len(test.rows)} rows are one problem, because their first observations are "
                "equal; give the environment a method `canonical` whose text differs between problems"
            )

    def _distinct(self, name: str, task: Task, share: int, seen: set[str], *, or_fewer: bool) -> list[Prompt]:
        """Return `share` prompts of evaluated problems whose ids are not in `seen`. Add their ids to `seen`."""
        prompts: list[Prompt] = []
        index, last_new, too_long = 0, 0, 0
        while len(prompts) < share:
            problem = task.draw(0, index)  # the seed is the same in every run, so that evaluations are comparable
            index += 1
            if name in self._undrawn:
                self._tested.add(problem.problem_id)
                self._undrawn[name] = max(self._undrawn[name], index)
            is_new = self.evaluates(name, problem) and problem.problem_id not in seen
            has_room = not is_new or self.has_room(prompt := self.prompt(name, problem))
            too_long += not has_room
            if is_new and has_room:
                seen.add(problem.problem_id)
                prompts.append(prompt)
                last_new = index
            elif index - last_new > MAX_MISSES:
                if prompts and or_fewer:
                    break
                advice = "raise engine.max_context_tokens, because other prompts are too long, or " * bool(too_long)
                if not isinstance(task, FileTask):
                    advice += "request fewer, widen its params, or add rows"
                elif prompts or name in self._tests:
                    advice += "request fewer, or add rows"
                else:
                    advice += (
                        "add rows, give a test set ([[eval.task]]; eval_data in Python), or train without evaluations "
                        "(eval.enabled = false)"
                    )
                raise TaskExhausted(
                    f"task {name!r} has only {len(prompts)} distinct held-out problems ({HELD_OUT_PERCENT} % of all), "
                    f"but {share} were requested: {advice}" + _CANONICAL * isinstance(task, EnvironmentTask)
                )
        return prompts


class PromptStream:
    """The endless training stream of a mixture. The state of the stream is the number of draws from each task."""

    def __init__(self, mixture: TaskMixture, seed: int, start: Mapping[str, int] | None = None) -> None:
        """`start`: the `position` of an earlier stream, from which this stream continues."""
        self._mixture = mixture
        self._seed = seed
        self.position = {name: (start or {}).get(name, 0) for name in mixture.tasks}
        """Task name → number of draws so far, including draws of held-out problems."""
        self._too_long = 0

    def close(self) -> None:
        """End the processes that draw problems."""
        self._mixture.close()

    def take_counts(self) -> dict[str, float]:
        """Return a metric: the number of prompts that were skipped since the last call because they are too long."""
        taken, self._too_long = self._too_long, 0
        return {"prompts/too_long": float(taken)} if taken else {}

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next training prompts. Raises TaskExhausted after `MAX_MISSES` draws without a usable problem."""
        names = list(self._mixture.tasks)
        prompts: list[Prompt] = []
        misses = 0
        while len(prompts) < num_prompts:
            # each draw has its own generator, so that a stream can continue from `position` without a random state
            dice = random.Random(f"{self._seed}:{sum(self.position.values())}")
            name = dice.choices(names, self._mixture.weights)[0]
            problem = self._mixture.tasks[name].draw(self._seed, self.position[name])
            self.position[name] += 1
            prompt = self._mixture.prompt(name, problem)
            is_trained = self._mixture.trains_on(name, problem)
            has_room = not is_trained or self._mixture.has_room(prompt)
            self._too_long += not has_room
            if is_trained and has_room:
                prompts.append(prompt)
                misses = 0
                continue
            misses += 1
            if misses > MAX_MISSES:
                hint = "widen its params, or choose a dataset with other problems than the test sets"
                hint += _CANONICAL * isinstance(self._mixture.tasks[name], EnvironmentTask)
                hint = hint if has_room else "its prompts are too long: raise engine.max_context_tokens"
                raise TaskExhausted(f"task {name!r} gave no training problem in {MAX_MISSES} draws: {hint}")
        return prompts
