"""A maze. The policy sees only the cells around its position, so it must explore over several turns."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from baton.environments.grid import MOVES, Cell, Form, canonical_grid, random_moves, read_moves
from baton.errors import UserError

INSTRUCTIONS = """You are in a maze. Walk to the goal. You see only the cells around you.
The symbols are: # wall, . floor, G goal, @ you, ? outside of the maze.
Your moves are Up, Down, Left and Right. Answer each turn with at most {moves} moves separated by ||, for example \
<answer>Right || Up</answer>."""


class Maze:
    """The maze environment. The reward is 1 at the goal; `success` is whether the policy reached the goal."""

    def __init__(
        self, size: int = 7, view: int = 2, max_turns: int = 12, actions_per_turn: int = 4, form: Form = "ragen"
    ) -> None:
        """`size`: odd, with the outer walls. `view`: visible cells in each direction. Raises UserError."""
        if size < 5 or size % 2 == 0 or min(view, max_turns, actions_per_turn) < 1 or form not in ("ragen", "compact"):
            raise UserError(
                f"maze: got size {size}, view {view}, max_turns {max_turns}, actions_per_turn {actions_per_turn}, form "
                f"{form!r}; allowed are odd sizes from 5, positive numbers, and form 'ragen' or 'compact'"
            )
        self._size, self._view, self._form = size, view, form
        self._turns_left, self._actions_per_turn = max_turns, actions_per_turn
        self.instructions = INSTRUCTIONS.format(moves=actions_per_turn) if form == "ragen" else ""

    def reset(self, *, seed: int) -> str:
        """Start at a random cell. The goal is the cell that is farthest from the start."""
        dice = random.Random(f"maze:{seed}")
        self._floor = _carved(dice, self._size)
        self._player = dice.choice(sorted(self._floor))
        self._goal = _farthest(self._floor, self._player)
        return self._observation()

    def canonical(self) -> str:
        cells = range(self._size)
        return canonical_grid(["".join(self._symbol((row, column)) for column in cells) for row in cells])

    def random_action(self, dice: random.Random) -> str:
        return random_moves(dice, self._form, self._actions_per_turn)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute the moves of one turn; a move into a wall has no effect."""
        moves, is_valid = read_moves(action, self._form)
        for move in moves[: self._actions_per_turn]:
            ahead = (self._player[0] + MOVES[move][0], self._player[1] + MOVES[move][1])
            if ahead in self._floor and self._player != self._goal:
                self._player = ahead
        self._turns_left -= 1
        is_there = self._player == self._goal
        info = {"success": is_there, "is_valid": is_valid}
        return self._observation(), float(is_there), is_there, not is_there and self._turns_left <= 0, info

    def _observation(self) -> str:
        row, column = self._player
        window = range(-self._view, self._view + 1)
        seen = "\n".join("".join(self._symbol((row + r, column + c)) for c in window) for r in window)
        return seen if self._form == "compact" else f"You see:\n{seen}\nYou have {self._turns_left} turns left."

    def _symbol(self, cell: Cell) -> str:
        if not 0 <= min(cell) <= max(cell) < self._size:
            return "?"
        if cell == self._player:
            return "@"
        return "#" if cell not in self._floor else "G" if cell == self._goal else "."


def _carved(dice: random.Random, size: int) -> frozenset[Cell]:
    """Return the floor of a maze without loops: a random depth-first walk over the cells with odd coordinates."""
    stack: list[Cell] = [(1, 1)]
    floor = {(1, 1)}
    while stack:
        row, column = stack[-1]
        ahead = [(row + 2 * rows, column + 2 * columns) for rows, columns in MOVES.values()]
        ahead = [cell for cell in ahead if 0 < min(cell) <= max(cell) < size - 1 and cell not in floor]
        if not ahead:
            stack.pop()
            continue
        stack.append(dice.choice(ahead))
        between = ((row + stack[-1][0]) // 2, (column + stack[-1][1]) // 2)
        floor |= {between, stack[-1]}
    return frozenset(floor)


def _farthest(floor: frozenset[Cell], start: Cell) -> Cell:
    queue, seen = deque([start]), {start}
    cell = start
    while queue:
        cell = queue.popleft()
        for rows, columns in MOVES.values():
            ahead = (cell[0] + rows, cell[1] + columns)
            if ahead in floor and ahead not in seen:
                seen.add(ahead)
                queue.append(ahead)
    return cell
