"""Tasks from reasoning-gym, which generates problems and verifies answers, and the two tasks of `arithmetic.py`.

reasoning-gym derives item i of seed s from s + i, so item i of seed 3 is item i + 2 of seed 1. To avoid such overlaps,
streams use 48-bit hashes as seeds. The train/held-out split does not depend on seeds (see `Problem.is_held_out`).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from types import ModuleType
from typing import Any

import msgspec
from blake3 import blake3

from baton.errors import UserError, nearest
from baton.rewards.functions import number
from baton.rewards.scorer_protocol import Score, Scorer, ScorerSpec
from baton.tasks.arithmetic import OWN_TASKS, ArithmeticProblems
from baton.tasks.problem import Problem
from baton.tasks.problem_forms import COMPACT_FORMS, canonical_problem

BLOCK = 500
"""Number of items of each reasoning-gym dataset object. The number is small, because some datasets generate all items
when they are created."""
NARROW_SEEDS = frozenset({"pool_matrix"})
"""Tasks that pass their seed to numpy, which accepts only 32 bits."""
QUICK_SCORERS = frozenset({*OWN_TASKS, "decimal_chain_sum", "gsm_symbolic", "knights_knaves", "products"})
"""Tasks with a scorer of their own that takes microseconds for any answer: it only compares numbers or sets of words.

The default scorer, which many tasks inherit, also takes microseconds. All other scorers may take long, so they run in
worker processes, which can be killed.
"""
HOW_TO_INSTALL = (
    "run `pip install 'baton-rl[gym]'`, or without a C compiler `pip install 'baton-rl[gym-pure]'` and then "
    "`pip install --no-deps reasoning-gym==0.1.25`"
)
NEEDS_COMPILER = {"bfi": "bf", "pycosat": "zebra_puzzles"}
"""Compiled module → the task that needs it. reasoning-gym imports all of these modules when it is imported."""
_NUMBER = re.compile(r"[-+]?[\d\s.,/]*([eE][-+]?\d{1,2})?\s*%?")
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/.()]*", re.DOTALL)
_LITERAL = re.compile(r"[\w\s,'\"\[\]-]*")
_FORMULA = re.compile(
    r"(?!.*[\d.]\s*\*\s*\*)"  # refuses a power of a number: 9**9**9
    r"([\d\s+\-*/.()=]|(?<![A-Za-z.\d])(sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|sqrt|pi|[A-Za-z])(?![A-Za-z]))*",
    re.DOTALL,
)
_PLAIN_ANSWERS: dict[str, re.Pattern[str]] = {
    "binary_matrix": _LITERAL,
    "coin_flip": _NUMBER,
    "countdown": _ARITHMETIC,
    "intermediate_integration": _FORMULA,
    "n_queens": _LITERAL,
    "polynomial_multiplication": _FORMULA,
    "puzzle24": _ARITHMETIC,
    "simple_integration": _FORMULA,
    "spiral_matrix": _LITERAL,
    "string_insertion": _LITERAL,
}
"""reasoning-gym task whose scorer evaluates the answer → pattern of the admitted answers."""
_MAX_ANSWER_CHARACTERS = 2_000
"""Maximum length of an answer. Longer answers could be nested so deeply that the evaluation exhausts time or stack."""


class GymTask:
    """One reasoning-gym task with its parameters."""

    columns = ("gym_seed", "gym_index")

    def __init__(self, name: str, gym_name: str, params: dict[str, Any], *, is_compact: bool) -> None:
        """Check the arguments by generating one item. Raises UserError for an unknown task or invalid `params`, or if
        `is_compact` is set and the task has no compact form."""
        self.name = name
        self._gym_name = gym_name
        self._params = params
        self._is_compact = is_compact
        if gym_name not in OWN_TASKS and gym_name not in (known := gym_tasks()):
            _import_gym()
            hint = nearest(gym_name, known, "`baton tasks` lists them")
            raise UserError(f"task {name!r}: reasoning-gym has no task {gym_name!r}; {hint}")
        if is_compact and gym_name not in COMPACT_FORMS:
            raise UserError(
                f"task {name!r}: form = 'compact' is not available for {gym_name!r}, only for "
                f"{', '.join(sorted(COMPACT_FORMS))}; use form = 'original'"
            )
        self._dataset = lru_cache(maxsize=8)(self._make_dataset)
        self._entry = lru_cache(maxsize=4096)(self._make_entry)
        self._literal = lru_cache(maxsize=1024)(self._make_literal)
        self._entry(0, 0)

    @property
    def scorer(self) -> Scorer:
        is_quick = self._gym_name in QUICK_SCORERS
        if not is_quick:
            inherited = importlib.import_module("reasoning_gym.dataset").ProceduralDataset.score_answer
            is_quick = type(self._dataset(0)).score_answer is inherited
        arguments = {"task": self.name, "gym_name": self._gym_name, "params": self._params}
        return "inline" if is_quick else ScorerSpec(self.name, f"{__name__}:{gym_scorer.__name__}", arguments)

    def draw(self, seed: int, index: int) -> Problem:
        block, item = divmod(index, BLOCK)
        gym_seed = int.from_bytes(blake3(f"{self._gym_name}:{seed}:{block}".encode()).digest(length=6), "big")
        if self._gym_name in NARROW_SEEDS:
            gym_seed %= 2**32 - BLOCK
        entry = self._entry(gym_seed, item)
        question = COMPACT_FORMS[self._gym_name](entry) if self._is_compact else str(entry["question"])
        return Problem(
            question=question,
            canonical=canonical_problem(self._gym_name, entry),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            metadata={"gym_seed": gym_seed, "gym_index": item},
        )

    def portable(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Add the problem's reasoning-gym entry to the metadata, because generating it again can take longer than
        scoring. The entry is stored as a Python literal, because JSON would turn tuples into lists. If an entry cannot
        be written as a literal, it is left out, and `score` generates it again."""
        entry = self._literal(metadata["gym_seed"], metadata["gym_index"])
        return metadata if entry is None else {**metadata, "entry": entry}

    def score(self, answer: str | None, reference: str | None, metadata: dict[str, Any]) -> float:
        """Score an answer with reasoning-gym's verifier. If the metadata has no entry, generate it from seed and index.
        An answer that must not be passed to the verifier (`may_be_scored`) scores 0."""
        if answer is None or not may_be_scored(self._gym_name, answer):
            return 0.0
        if "entry" in metadata:
            entry = ast.literal_eval(metadata["entry"])
        else:
            entry = self._entry(metadata["gym_seed"], metadata["gym_index"])
        return float(self._dataset(metadata["gym_seed"]).score_answer(answer, entry))

    def _make_dataset(self, gym_seed: int) -> Any:
        try:
            if self._gym_name in OWN_TASKS:
                return ArithmeticProblems(self._gym_name, gym_seed, self._params)
            gym = _import_gym()
            with redirect_stdout(sys.stderr):  # some generators print dots, which would break --json
                return gym.create_dataset(self._gym_name, seed=gym_seed, size=BLOCK, **self._params)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"task {self.name!r}: {self._gym_name} rejects params {self._params}: {error}") from error

    def _make_literal(self, gym_seed: int, item: int) -> str | None:
        text = repr(self._entry(gym_seed, item))
        try:
            return text if repr(ast.literal_eval(text)) == text else None
        except (ValueError, SyntaxError):
            return None

    def _make_entry(self, gym_seed: int, item: int) -> dict[str, Any]:
        try:
            dataset = self._dataset(gym_seed)
            with redirect_stdout(sys.stderr):
                entry: dict[str, Any] = dataset[item]
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"task {self.name!r}: {self._gym_name} cannot generate a problem with params "
                f"{self._params} ({type(error).__name__}: {error}); change the params"
            ) from error
        return entry


def gym_scorer(task: str, gym_name: str, params: dict[str, Any]) -> Score:
    """Return the scorer of a task. A worker process calls this function by the import path in a `ScorerSpec`."""
    gym_task = GymTask(task, gym_name, params, is_compact=False)
    return lambda call: number(gym_task.score(call.answer, call.prompt.answer, call.prompt.metadata))


def may_be_scored(gym_name: str, answer: str) -> bool:
    """Return whether an answer may be passed to the task's scorer.

    Some scorers pass the answer to `eval`, or to sympy's `parse_expr`, which calls `eval`. An answer such as
    `__import__('os').system(…)` would be executed, and `9**9**9**9` would not return. Answers are untrusted, because
    the policy writes them. For tasks with such a scorer, only the plain form that the task asks for is admitted.
    """
    plain = _PLAIN_ANSWERS.get(gym_name)
    return plain is None or (len(answer) <= _MAX_ANSWER_CHARACTERS and plain.fullmatch(answer) is not None)


def gym_tasks() -> list[str]:
    """Return the names of all tasks. Without reasoning-gym, these are the tasks of `arithmetic.py`."""
    if not has_gym():
        return sorted(OWN_TASKS)
    _import_gym()
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    return sorted({*OWN_TASKS, *datasets} - {"composite"})


def has_gym() -> bool:
    """Return whether reasoning-gym is installed."""
    return importlib.util.find_spec("reasoning_gym") is not None


class ListedTask(msgspec.Struct, frozen=True):
    """A reasoning-gym task with an example problem."""

    name: str
    question: str
    answer: str | None
    compact: str | None
    """The same example in the compact form; None if the task has no compact form."""
    params: dict[str, Any]
    """Default values of the parameters."""


def list_tasks(name: str | None = None) -> list[ListedTask]:
    """Return the task `name`, or all tasks, each with an example. If a task needs a module that is not installed, the
    text of the error replaces its example."""
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
    if name in OWN_TASKS:
        values = OWN_TASKS[name]().model_dump()
    else:
        config = importlib.import_module("reasoning_gym.factory").DATASETS[name][1]()
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        key: str(value) if not isinstance(value, (int, float, str, bool)) else value
        for key, value in values.items()
        if key not in ("seed", "size")
    }


@lru_cache(maxsize=1)
def _import_gym() -> Any:
    if not has_gym():
        raise UserError(f"reasoning-gym is not installed: {HOW_TO_INSTALL}")
    stubs = [name for name in NEEDS_COMPILER if importlib.util.find_spec(name) is None]
    for name in stubs:
        sys.modules[name] = _NotCompiled(name)
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise UserError(f"reasoning-gym needs the module {error.name}: {HOW_TO_INSTALL}") from error
    finally:
        for name in stubs:  # reasoning-gym's modules have imported the stub already; other code must not import it
            del sys.modules[name]


class _NotCompiled(ModuleType):
    """Stub for a compiled module that is not installed. Any use by the task that needs the module raises UserError."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        name = self.__name__
        raise UserError(
            f"task {NEEDS_COMPILER[name]!r} needs the module {name}: run `pip install {name}` (needs a C compiler)"
        )
