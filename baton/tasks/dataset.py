"""A user's own problems: a JSONL file with `prompt` and `answer`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import UserError
from baton.tasks.task import Problem
from baton.types import Message

_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


class FileTask:
    """Rows of a JSONL file. A draw goes through all rows in a fresh random order each epoch."""

    def __init__(self, name: str, path: str) -> None:
        """Read and check the whole file. Raises UserError naming file and line."""
        self.name = name
        self._rows = _read_rows(name, path)
        self._order = lru_cache(maxsize=4)(self._make_order)

    def __len__(self) -> int:
        return len(self._rows)

    def draw(self, seed: int, index: int) -> Problem:
        """See `Task`."""
        epoch, place = divmod(index, len(self._rows))
        return self._rows[self._order(seed, epoch)[place]]

    def score(self, answer: str | None, reference: str | None, metadata: dict[str, Any]) -> float:
        """1 when the answer equals the reference, as text without outer blanks or as the same number."""
        if answer is None or reference is None:
            return 0.0
        return float(answer.strip() == reference.strip() or _same_number(answer, reference))

    def _make_order(self, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        return order


def read_demonstrations(path: str, seed: int) -> Iterator[tuple[tuple[Message, ...], str]]:
    """Yield (prompt messages, response) from a JSONL file with `prompt` and `completion`, shuffled anew each epoch."""
    rows = []
    for number, row in _json_rows("data", path, ("prompt", "completion")):
        if not isinstance(row["completion"], str):
            raise UserError(f"data: {path}, line {number}: 'completion' must be a text")
        rows.append(((Message("user", row["prompt"]),), row["completion"]))
    dice = random.Random(f"demonstrations:{seed}")
    while True:
        dice.shuffle(rows)
        yield from rows


def _read_rows(name: str, path: str) -> list[Problem]:
    problems = []
    for number, row in _json_rows(f"task {name!r}", path, ("prompt", "answer")):
        question, answer = row["prompt"], row["answer"]
        if not isinstance(answer, (str, int, float)):
            raise UserError(f"task {name!r}: {path}, line {number}: 'answer' must be a text or a number")
        extra = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
        problems.append(Problem(question, f"file:{' '.join(question.lower().split())}", str(answer), extra))
    return problems


def _json_rows(what: str, path: str, columns: tuple[str, str]) -> list[tuple[int, dict[str, Any]]]:
    """Line number and object of each row. Raises UserError naming file and line; the first column must be a text."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{what}: there is no file {path!r} (seen from {Path.cwd()})")
    rows = []
    # bytes, so that only a newline ends a row: a JSON text may hold any other line separator as it is
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{what}: {path}, line {number} is not a JSON object: {error}") from error
        missing = [column for column in columns if column not in row]
        if missing:
            raise UserError(f"{what}: {path}, line {number} has no {missing[0]!r}; it has {sorted(row)}")
        if not isinstance(row[columns[0]], str):
            raise UserError(f"{what}: {path}, line {number}: {columns[0]!r} must be a text")
        rows.append((number, row))
    if not rows:
        raise UserError(f"{what}: {path} has no rows")
    return rows


def _same_number(answer: str, reference: str) -> bool:
    try:
        return _number(answer) == _number(reference)
    except ArithmeticError:  # what decimal raises for a text that is no number
        return False


def _number(text: str) -> Decimal:
    """The exact value of a number; commas count only where they group thousands, so that `1,2` is not 12."""
    return Decimal(text.replace(",", "") if _GROUPED.fullmatch(text.strip()) else text)
