"""Code of the grid worlds: moves, their extraction from a turn, and a text that is equal for rotated or mirrored
grids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

Cell = tuple[int, int]
"""Row and column."""
Form = Literal["ragen", "compact"]
"""`ragen`: answers like `<answer>Right || Up</answer>`. `compact`: letters like `RU`, short observations."""
MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Name of a move → change of row and column. gym-sokoban's generator uses the same order."""
LETTERS = {name[0]: name for name in MOVES}


def read_moves(action: str, form: Form) -> tuple[list[str], bool]:
    """Return the moves of a turn, and whether the turn has the answer format and contains only moves."""
    if form == "compact":
        names = [LETTERS.get(letter, "") for letter in action.strip()]
    else:
        # not a regular expression, which would take quadratic time for many tags that are not closed
        closed = action.split("</answer>")[:-1]
        answers = [text.partition("<answer>")[2] for text in closed if "<answer>" in text]
        names = [name.strip().capitalize() for name in answers[-1].split("||")] if answers else []
    moves = [name for name in names if name in MOVES]
    return moves, bool(moves) and len(moves) == len(names)


def random_moves(dice: random.Random, form: Form, max_moves: int) -> str:
    """Return a turn of 1 to `max_moves` uniformly random moves in the answer format."""
    names = dice.choices(list(MOVES), k=dice.randint(1, max_moves))
    return "".join(name[0] for name in names) if form == "compact" else f"<answer>{' || '.join(names)}</answer>"


def canonical_grid(rows: Sequence[str]) -> str:
    """Return a string that is equal for grids that are rotations or reflections of each other."""
    found = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]  # a quarter turn
        found += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return min(found)
