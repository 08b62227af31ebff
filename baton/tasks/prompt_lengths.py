"""Measures the prompts of a recipe's tasks before generation starts, so that the run skips prompts that are too long.

In a file, only the rows that may be too long are tokenised, longest first. For a generated task, a sample is tokenised.
If this check misses a prompt that is too long, the prompt is skipped when it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.errors import UserError
from baton.tasks.dataset import FileTask
from baton.tasks.problem import Problem
from baton.tasks.stream import TaskMixture
from baton.types import Prompt

SAMPLE = 64
"""Number of problems of a generated task that are measured."""
MAX_MEASURED = 20_000
"""Maximum number of rows of a file that are tokenised."""
SHORT_IN_A_ROW = 256
"""Rows are tokenised from the longest to the shortest. If this number of consecutive prompts have less than half of the
allowed tokens, all remaining rows are assumed to fit."""


class PromptLengths(msgspec.Struct, frozen=True):
    """Measured prompt lengths of a task."""

    task: str
    rows: int | None
    """Number of rows of the file; None for a generated task."""
    held_out: int | None
    """For a training file: number of its distinct problems that are not trained on. For the file of a test set: number
    of its distinct problems that evaluations use. None for a generated task."""
    longest_tokens: int
    """Number of tokens of the longest measured prompt."""
    max_tokens: int
    """Maximum length of a prompt in tokens, so that a response still fits into the context."""
    too_long: int
    """Number of measured prompts with more than `max_tokens`, including held-out prompts."""

    def __str__(self) -> str:
        if self.rows is None:
            longest = f"generated; the longest of {SAMPLE} prompts"
        else:
            held_out = f"{self.held_out or 'no'} distinct problems are held out or in a test set"
            longest = f"{self.rows} rows; {held_out}; the longest prompt"
        text = f"{self.task}: {longest} has {self.longest_tokens} tokens, {self.max_tokens} are allowed"
        return text if not self.too_long else f"{text}; {self.too_long} prompts are too long and are skipped"


def measure(
    mixture: TaskMixture,
    num_tokens: Callable[[Prompt], int],
    max_context_tokens: int,
    *,
    seed: int,
    on_measured: Callable[[int], None] = lambda count: None,
) -> list[PromptLengths]:
    """Configure the mixture to skip prompts that are too long; return the measured lengths of each task.

    `on_measured`: called with the number of prompts measured since the last call. Raises UserError if a task with
    `too_long = "refuse"` has a prompt that is too long.
    """
    mixture.limit(num_tokens, max_context_tokens - 1)
    found = []
    for name, task in {**mixture.tasks, **mixture.tests}.items():
        max_tokens = mixture.max_tokens[name]
        rows = task.rows if isinstance(task, FileTask) else None
        problems = rows if rows is not None else [task.draw(seed, index) for index in range(SAMPLE)]
        longest, too_long = 0, 0
        for length in _lengths(mixture, name, problems, num_tokens, max_tokens):
            on_measured(1)
            longest, too_long = max(longest, length), too_long + (length > max_tokens)
        if too_long and mixture.settings[name].too_long == "refuse":
            raise UserError(
                f"task {name!r}: {too_long} prompts are longer than {max_tokens} tokens, the longest has {longest}, "
                f"and engine.max_context_tokens is {max_context_tokens} for prompt and response together; raise it, "
                'remove the prompts, or set too_long = "filter" to skip them'
            )
        is_test = name in mixture.tests
        apart = [p for p in rows or () if (mixture.evaluates(name, p) if is_test else not mixture.trains_on(name, p))]
        held_out = None if rows is None else len({p.problem_id for p in apart})
        found.append(PromptLengths(name, None if rows is None else len(rows), held_out, longest, max_tokens, too_long))
    return found


def _lengths(
    mixture: TaskMixture, name: str, problems: Sequence[Problem], num_tokens: Callable[[Prompt], int], max_tokens: int
) -> Iterator[int]:
    """Yield the number of tokens of each prompt, beginning with the prompt that has the most characters, until the
    remaining prompts are assumed to fit (`SHORT_IN_A_ROW`)."""
    prompts = [mixture.prompt(name, problem) for problem in problems]
    prompts.sort(key=lambda prompt: -sum(len(m.content) for m in prompt.messages))
    short = 0
    for prompt in prompts[:MAX_MEASURED]:
        length = num_tokens(prompt)
        yield length
        short = short + 1 if 2 * length < max_tokens else 0
        if short == SHORT_IN_A_ROW:
            return
