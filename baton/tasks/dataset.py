"""Reads problems, and demonstrations for the warm start, from a user's file."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

import msgspec

from baton.errors import UserError
from baton.rewards.answer import choice_letter, plain_number
from baton.rewards.dataset_columns import (
    LETTERS,
    PROMPT_COLUMNS,
    REFERENCE_COLUMNS,
    choices_of,
    find_reference,
    lookup,
    messages_of,
)
from baton.rewards.scorer_protocol import MathSpec, Scorer
from baton.tasks.problem import Problem
from baton.tasks.rows import Row, read_rows
from baton.types import Message

FileScorer = Literal["number", "math", "letter", "none"]
_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


class FileTask:
    """A task whose problems are the rows of a file. Each epoch visits every row once, in a new random order."""

    def __init__(
        self,
        name: str,
        path: str,
        *,
        split: str = "train",
        config: str | None = None,
        prompt_column: str = "prompt",
        answer_column: str | None = None,
        answer_after: str | None = None,
        scorer: FileScorer = "number",
    ) -> None:
        """Read and check the whole file. Raises UserError that names the file and the line or row."""
        scorers: dict[FileScorer, Scorer] = {"number": "inline", "math": MathSpec(), "letter": "inline", "none": None}
        self.name, self.scorer, self._scores = name, scorers[scorer], scorer
        rows = read_rows(f"task {name!r}", path, split, config)
        if prompt_column == "prompt":  # all rows use the column that the first row has
            prompt_column = next((c for c in PROMPT_COLUMNS if rows[0][1].get(c) is not None), prompt_column)
        self._prompt_column, self._answer_column, self._answer_after = prompt_column, answer_column, answer_after
        self.rows = [self._problem(where, row) for where, row in rows]
        self.columns = frozenset(name for row in self.rows for name in row.metadata)
        self._order = lru_cache(maxsize=4)(self._make_order)

    def draw(self, seed: int, index: int) -> Problem:
        epoch, position = divmod(index, len(self.rows))
        return self.rows[self._order(seed, epoch)[position]]

    def portable(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return metadata

    def score(self, answer: str | None, reference: str | None, metadata: dict[str, Any]) -> float:
        """Return 1 if answer and reference are equal as numbers, or as text without leading and trailing whitespace;
        otherwise 0. With the scorer `letter`, compare the letters of the choices instead."""
        if answer is None or reference is None:
            return 0.0
        if self._scores == "letter":
            return float(choice_letter(answer) == reference)
        return float(answer.strip() == reference.strip() or _same_number(answer, reference))

    def _problem(self, where: str, row: Row) -> Problem:
        where = f"task {self.name!r}: {where}"
        prompt = lookup(row, self._prompt_column)
        if prompt is None:
            hint = "" if self._prompt_column != "prompt" or len(row) < 2 else "; name another with prompt_column"
            raise UserError(f"{where} has no {self._prompt_column!r}; it has {sorted(row)}{hint}")
        try:
            messages = messages_of(prompt)
        except ValueError as error:
            raise UserError(f"{where}: {self._prompt_column!r} {error}") from error
        extra = {name: value for name, value in row.items() if name != "prompt" or self._prompt_column != "prompt"}
        value = None if self._scores == "none" else self._value(where, row)
        answer = None if value is None else self._reference(where, value)
        if self._scores == "letter":
            labels, texts = choices_of(row)
            answer = self._choice(where, value, labels, texts)
            if messages is None and texts:
                prompt += "\n\n" + "\n".join(f"{a}. {text}" for a, text in zip(LETTERS, texts, strict=False))
        if messages is None:
            return Problem(prompt, f"file:{_canonical(prompt)}", answer, extra)
        # the system message is not part of the canonical problem: it does not change the question
        content = " ".join(m.content for m in messages if m.role != "system")
        return Problem(messages[-1].content, f"file:{_canonical(content)}", answer, extra, messages)

    def _value(self, where: str, row: Row) -> str | int | float:
        column = self._answer_column
        value = find_reference(row) if column is None else lookup(row, column)
        if value is None:
            if column is None:
                others = ", ".join(REFERENCE_COLUMNS[1:])
                hint = f"nor {others}: name the column with answer_column, or set scorer = 'none'"
            else:
                hint = "which answer_column names"
            raise UserError(f"{where} has no {column or 'answer'!r}; it has {sorted(row)} ({hint})")
        if value != value or (isinstance(value, str) and not value.strip()):  # NaN, as in parquet files
            raise UserError(f"{where}: the reference answer is empty: {row!r:.200}; remove the row, or name its column")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UserError(f"{where}: {column or 'answer'!r} must be a string or a number, got {_shown(value)}")
        return value

    def _reference(self, where: str, value: str | int | float) -> str:
        text = str(value)
        if self._answer_after is None:
            last_line = text.rstrip().rpartition("\n")[2]
            stated = last_line.removeprefix("####").strip()  # as in GSM8K
            return stated if stated and last_line.startswith("####") else text
        _, mark, text = text.rpartition(self._answer_after)
        if not mark:
            raise UserError(f"{where}: the answer has no {self._answer_after!r} (answer_after): {_shown(value)}")
        return text.strip()

    def _choice(self, where: str, value: Any, labels: list[str], texts: list[str]) -> str:
        """Return the letter of the correct choice. `value` states the choice as a label, an index from 0, a letter or
        the choice's text."""
        names = [str(label) for label in labels]  # ARC has the labels 1 to 4 in some rows
        if str(value) in names:
            return LETTERS[names.index(str(value))]
        if isinstance(value, int) and 0 <= value < (len(texts) or len(LETTERS)):
            return LETTERS[value]
        for known in (texts, list(LETTERS[: 0 if texts else None])):
            if value in known:
                return LETTERS[known.index(value)]
        raise UserError(
            f'{where}: scorer = "letter" needs the correct choice as its letter, text or index from 0; got '
            f"{_shown(value)} and {len(texts)} choices in the column choices or options"
        )

    def _make_order(self, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        return order


def read_demonstrations(path: str, seed: int) -> Iterator[tuple[tuple[Message, ...], str]]:
    """Yield (prompt messages, response) of each row, from its columns `prompt` and `completion`. The iterator never
    ends: it repeats the rows, shuffled again in each epoch.

    Raises UserError that names the file and the line or row.
    """
    rows = [_demonstration(where, row) for where, row in read_rows("data", path)]
    dice = random.Random(f"demonstrations:{seed}")
    while True:
        dice.shuffle(rows)
        yield from rows


def _demonstration(where: str, row: Row) -> tuple[tuple[Message, ...], str]:
    for column in ("prompt", "completion"):
        if column not in row:
            raise UserError(f"data: {where} has no {column!r}; it has {sorted(row)}")
        if not isinstance(row[column], str):
            raise UserError(f"data: {where}: {column!r} must be a string")
    return (Message("user", row["prompt"]),), row["completion"]


def _canonical(text: str) -> str:
    return " ".join(text.lower().split())


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "…"


def _same_number(answer: str, reference: str) -> bool:
    try:
        return _number(answer) == _number(reference)
    except ArithmeticError:  # Decimal raises this error for a string that is not a number
        return False


def _number(text: str) -> Decimal:
    """Return the exact value of a number. Commas may only group thousands: `1,200` is 1200, but `1,2` is not 12."""
    text = plain_number(text)
    return Decimal(text.replace(",", "") if _GROUPED.fullmatch(text.strip()) else text)
