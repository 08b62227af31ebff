"""Sokoban by RAGEN's published rules: rooms by reverse play, rewards per move, several moves per turn.

Rooms come from the generator of gym-sokoban with RAGEN's `search_depth`: a random walk makes the floor, boxes start on
their targets, and a depth-first search over reversed moves selects the state that is farthest from the solution (see
`_pulled`). Every room therefore has a solution.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from baton.environments.grid import MOVES, Cell, Form, canonical_grid, random_moves, read_moves
from baton.errors import UserError

MASKS = ("000111000", "010010010", "000110010", "000110110", "000011010")
"""Masks of 3 × 3 cells, row by row, around a position of the random walk. Cells with 1 become floor."""
TURN_PROBABILITY = 0.35
MAX_STATES = 300_000
SYMBOLS = {"grid": "#_O√XPS", "ascii": "#-.*$@+"}
"""Name of a symbol set → its symbols for: wall, floor, target, box on a target, box, player, player on a target."""
STEP_REWARD, BOX_REWARD, SOLVED_REWARD, FORMAT_REWARD = -0.1, 1.0, 10.0, -0.1
INSTRUCTIONS = """You are solving the Sokoban puzzle. Push all boxes onto the targets. You can push a box but not pull \
it, and only one box at a time; a box cannot be pushed into a wall or another box.
The symbols are: # wall, _ empty, O target, √ box on target, X box, P you, S you on target.
Your moves are Up, Down, Left and Right. Answer each turn with at most {moves} moves separated by ||, for example \
<answer>Right || Up</answer>."""


@dataclass(frozen=True, slots=True)
class Room:
    """A state of a room."""

    size: int
    floor: frozenset[Cell]
    """Cells that are not walls, including targets."""
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    def moved(self, move: str) -> Room:
        """Return the room after a move, which may push one box; the same room if the way is blocked."""
        rows, columns = MOVES[move]
        ahead = (self.player[0] + rows, self.player[1] + columns)
        if ahead not in self.floor:
            return self
        boxes = self.boxes
        if ahead in boxes:
            behind = (ahead[0] + rows, ahead[1] + columns)
            if behind not in self.floor or behind in boxes:
                return self
            boxes = boxes - {ahead} | {behind}
        return Room(self.size, self.floor, self.targets, boxes, ahead)

    def drawn(self, symbols: str, *, outer_wall: bool = True) -> str:
        """Return the rows of the room, one symbol per cell. `symbols`: one per kind of cell, as in `SYMBOLS`."""
        cells = range(self.size) if outer_wall else range(1, self.size - 1)
        return "\n".join("".join(symbols[self._symbol((row, column))] for column in cells) for row in cells)

    @property
    def canonical(self) -> str:
        """A string that is equal for rooms that are rotations or reflections of each other."""
        return canonical_grid(self.drawn(SYMBOLS["ascii"]).split("\n"))

    def _symbol(self, cell: Cell) -> int:
        if cell not in self.floor:
            return 0
        on_target = cell in self.targets
        if cell in self.boxes:
            return 3 if on_target else 4
        if cell == self.player:
            return 6 if on_target else 5
        return 2 if on_target else 1


def generate_room(seed: int, *, size: int, num_boxes: int, search_depth: int) -> Room:
    """Return the room that `seed` determines. A room whose boxes are all on targets is drawn again."""
    dice = random.Random(f"sokoban:{seed}")
    while True:
        floor = _floor(dice, size)
        if len(floor) < num_boxes + 2:
            continue
        player, *targets = dice.sample(sorted(floor), num_boxes + 1)
        best = _pulled(floor, tuple(targets), player, search_depth)
        if best is not None:
            player, boxes, distance = best
            player = _walked(dice, floor.difference(boxes), player, 0.8 if distance == 1 else 0.5)
            return Room(size, floor, frozenset(targets), frozenset(boxes), player)


def _floor(dice: random.Random, size: int) -> frozenset[Cell]:
    inner = size - 2
    direction = dice.choice(list(MOVES.values()))
    row, column = dice.randint(1, inner), dice.randint(1, inner)
    found: set[Cell] = set()
    for _ in range(int(1.7 * 2 * size)):
        if dice.random() < TURN_PROBABILITY:
            direction = dice.choice(list(MOVES.values()))
        row = min(max(row + direction[0], 1), inner)
        column = min(max(column + direction[1], 1), inner)
        mask = dice.choice(MASKS)
        found |= {(row + i // 3 - 1, column + i % 3 - 1) for i in range(9) if mask[i] == "1"}
    return frozenset((r, c) for r, c in found if 1 <= r <= inner and 1 <= c <= inner)


def _pulled(
    floor: frozenset[Cell], targets: tuple[Cell, ...], player: Cell, search_depth: int
) -> tuple[Cell, tuple[Cell, ...], int] | None:
    """Return (player, boxes, distance) of the best state that a depth-first search over reversed moves reaches. The
    score of a state is the sum of the distances between boxes and their targets, times the number of changes of the
    pulled box. States with a covered target score 0. Returns None if all states score 0."""
    best, best_score = None, 0
    explored: set[tuple[Cell, frozenset[Cell]]] = set()
    stack = [(player, targets, 0, -1, search_depth)]
    while stack and len(explored) < MAX_STATES:
        player, boxes, num_changes, last_pulled, depth = stack.pop()
        state = (player, frozenset(boxes))
        if depth <= 1 or state in explored:
            continue
        explored.add(state)
        if not {player, *boxes} & set(targets):
            distance = sum(abs(b[0] - t[0]) + abs(b[1] - t[1]) for b, t in zip(boxes, targets, strict=True))
            if num_changes * distance > best_score:
                best, best_score = (player, boxes, distance), num_changes * distance
        for rows, columns in reversed(MOVES.values()):  # the last one on the stack is explored first
            ahead = (player[0] + rows, player[1] + columns)
            behind = (player[0] - rows, player[1] - columns)
            if ahead not in floor or ahead in boxes:
                continue
            if behind in boxes:  # a reversed push
                pulled = boxes.index(behind)
                after = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                stack.append((ahead, after, num_changes + (pulled != last_pulled), pulled, depth - 1))
            else:
                stack.append((ahead, boxes, num_changes, last_pulled, depth - 1))
    return best


def _walked(dice: random.Random, free: frozenset[Cell], player: Cell, probability: float) -> Cell:
    """Return the position after at most three random moves, because otherwise the player starts beside a box."""
    visited = [player]
    while len(visited) <= 3 and dice.random() <= (probability if len(visited) == 1 else 0.5):
        ahead = [(visited[-1][0] + rows, visited[-1][1] + columns) for rows, columns in MOVES.values()]
        choices = [cell for cell in ahead if cell in free and cell not in visited]
        if not choices:
            break
        visited.append(dice.choice(choices))
    return visited[-1]


class Sokoban:
    """The Sokoban environment. `success` is whether all boxes are on targets."""

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        max_turns: int = 5,
        actions_per_turn: int = 5,
        max_actions: int | None = None,
        search_depth: int = 100,
        form: Form = "ragen",
        rewards: Literal["ragen", "success"] = "ragen",
    ) -> None:
        """`max_actions`: moves per episode, by default `max_turns × actions_per_turn`. `form`: see `Form`; `compact`
        also omits outer wall and instructions. `rewards`: RAGEN's per move, or 1 for `success`. Raises UserError."""
        if not 4 <= size <= 20 or not 1 <= boxes <= 4 or min(max_turns, actions_per_turn, search_depth) < 1:
            raise UserError(
                f"sokoban: got size {size}, boxes {boxes}, max_turns {max_turns}, actions_per_turn {actions_per_turn}, "
                f"search_depth {search_depth}; allowed are sizes 4 to 20, 1 to 4 boxes, and positive numbers"
            )
        if form not in ("ragen", "compact") or rewards not in ("ragen", "success"):
            raise UserError(
                f"sokoban: got form {form!r} and rewards {rewards!r}; allowed are form 'ragen' or 'compact', "
                "rewards 'ragen' or 'success'"
            )
        self._make = {"size": size, "num_boxes": boxes, "search_depth": search_depth}
        self._max_turns, self._actions_per_turn = max_turns, actions_per_turn
        self._actions_left = max_turns * actions_per_turn if max_actions is None else max_actions
        self._form, self._rewards = form, rewards
        self.instructions = INSTRUCTIONS.format(moves=actions_per_turn) if form == "ragen" else ""
        self._turn = 0

    def reset(self, *, seed: int) -> str:
        self._room = generate_room(seed, **self._make)
        return self._observation()

    def canonical(self) -> str:
        return self._room.canonical

    def random_action(self, dice: random.Random) -> str:
        return random_moves(dice, self._form, self._actions_per_turn)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute the moves of one turn. Other words are skipped, but cost the (negative) format reward once."""
        moves, is_valid = read_moves(action, self._form)
        reward = 0.0 if is_valid else FORMAT_REWARD
        num_effective = 0
        for move in moves[: min(self._actions_per_turn, self._actions_left)]:
            before, self._room = self._room, self._room.moved(move)
            self._actions_left -= 1
            num_effective += before != self._room
            gained = len(self._room.boxes & self._room.targets) - len(before.boxes & before.targets)
            reward += STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * self._room.is_solved
            if self._room.is_solved:
                break
        self._turn += 1
        is_solved = self._room.is_solved
        is_over = not is_solved and (self._turn >= self._max_turns or self._actions_left <= 0)
        if self._rewards == "success":
            reward = float(is_solved)
        info = {"success": is_solved, "is_valid": is_valid, "effective_moves": num_effective}
        return self._observation(), reward, is_solved, is_over, info

    def _observation(self) -> str:
        if self._form == "compact":
            return self._room.drawn(SYMBOLS["ascii"], outer_wall=False)
        left = f"You have {self._actions_left} actions left."
        return f"Turn {self._turn + 1}:\nState:\n{self._room.drawn(SYMBOLS['grid'])}\n{left}"
