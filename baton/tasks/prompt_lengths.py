"""How long the prompts of a recipe's tasks are, known before anything is generated: too long ones are left out.

All rows of a file that may be too long are tokenised, the longest first; of a generated task only a sample is. What is
missed here is found when it is drawn, and left out then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.errors import UserError
from baton.tasks.dataset import FileTask
from baton.tasks.stream import TaskMixture
from baton.tasks.task import Problem
from baton.types import Message

SAMPLE = 64
"""Problems of a generated task that are measured."""
MOST_MEASURED = 20_000
"""Rows of a file that are tokenised at most."""
SHORT_IN_A_ROW = 256
"""Of the rows by falling number of characters: after so many below half of the limit the rest is taken to fit."""


class PromptLengths(msgspec.Struct, frozen=True):
    """What is known of a task's prompts."""

    task: str
    rows: int | None
    """Of a file; None where problems are generated."""
    held_out: int | None
    """Distinct held-out problems among them."""
    longest_tokens: int
    """Of those that were measured."""
    max_tokens: int
    """The longest that leaves room for a response."""
    too_long: int
    """Longer ones, held-out ones included; of a generated task among the first `SAMPLE`."""

    def __str__(self) -> str:
        if self.rows is None:
            said = (
                f"{self.task}: generated; the longest of {SAMPLE} prompts has {self.longest_tokens} tokens, "
                f"{self.max_tokens} are allowed"
            )
        else:
            said = (
                f"{self.task}: {self.rows} rows, {self.held_out} distinct held-out problems among them; the longest "
                f"prompt has {self.longest_tokens} tokens, {self.max_tokens} are allowed"
            )
        return said if not self.too_long else f"{said}; prompts left out because they are too long: {self.too_long}"


def measure(
    mixture: TaskMixture,
    num_tokens: Callable[[Sequence[Message]], int],
    max_context_tokens: int,
    *,
    seed: int,
    on_measured: Callable[[int], None] = lambda count: None,
) -> list[PromptLengths]:
    """Have a mixture leave out what is too long, and say how much that is; `on_measured` hears of prompts measured.

    Raises UserError where a task refuses such prompts.
    """
    most = max_context_tokens - 1
    mixture.limit(num_tokens, most)
    found = []
    for name, task in mixture.tasks.items():
        rows = task.rows if isinstance(task, FileTask) else None
        problems = rows if rows is not None else [task.draw(seed, index) for index in range(SAMPLE)]
        longest, too_long = 0, 0
        for length in _lengths(mixture, name, problems, num_tokens, most):
            on_measured(1)
            longest, too_long = max(longest, length), too_long + (length > most)
        if too_long and mixture.refuses_long[name]:
            raise UserError(
                f"task {name!r}: {too_long} prompts are longer than {most} tokens, the longest has {longest}, and "
                f"engine.max_context_tokens is {max_context_tokens} for prompt and response together; raise it, remove "
                'them, or set too_long = "filter" to leave them out'
            )
        held_out = None if rows is None else len({p.problem_id for p in rows if p.is_held_out})
        found.append(PromptLengths(name, None if rows is None else len(rows), held_out, longest, most, too_long))
    return found


def _lengths(
    mixture: TaskMixture,
    name: str,
    problems: Sequence[Problem],
    num_tokens: Callable[[Sequence[Message]], int],
    most: int,
) -> Iterator[int]:
    """Tokens of the longest prompts."""
    prompts = [mixture.prompt(name, problem).messages for problem in problems]
    prompts.sort(key=lambda messages: -sum(len(m.content) for m in messages))
    short = 0
    for messages in prompts[:MOST_MEASURED]:
        length = num_tokens(messages)
        yield length
        short = short + 1 if 2 * length < most else 0
        if short == SHORT_IN_A_ROW:
            return
