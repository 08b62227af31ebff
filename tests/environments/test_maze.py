"""The maze: the goal can be reached, only the cells around the player are shown, and turns are limited."""

from __future__ import annotations

from collections import deque

import pytest

from baton.environments.grid import MOVES
from baton.environments.maze import Maze
from baton.errors import UserError


def walk(size: int, seed: int) -> list[str]:
    """Moves to the goal, found by stepping in a maze of which all is seen."""
    queue: deque[list[str]] = deque([[]])
    seen = set()
    while queue:
        moves = queue.popleft()
        maze = Maze(size, view=size, max_turns=1, actions_per_turn=len(moves) + 1)
        maze.reset(seed=seed)
        shown, _, is_there, *_ = maze.step(f"<answer>{'||'.join(moves)}</answer>")
        if is_there:
            return moves
        if shown not in seen:
            seen.add(shown)
            queue += [[*moves, move] for move in MOVES]
    raise AssertionError("the goal cannot be reached")


@pytest.mark.parametrize("seed", range(3))
def test_the_goal_can_be_reached_and_gives_the_reward(seed: int) -> None:
    moves = walk(7, seed)
    maze = Maze(7, view=1, max_turns=len(moves), actions_per_turn=1, form="compact")
    first = maze.reset(seed=seed)
    assert [len(row) for row in first.splitlines()] == [3, 3, 3]
    assert first.splitlines()[1][1] == "@"
    rewards = [maze.step(move[0]) for move in moves]
    assert [reward for _, reward, *_ in rewards] == [0.0] * (len(moves) - 1) + [1.0]
    assert rewards[-1][2]
    assert rewards[-1][4]["success"]


def test_walls_stop_and_turns_are_limited() -> None:
    maze = Maze(7, max_turns=2, actions_per_turn=9)
    maze.reset(seed=3)
    maze.step("<answer>Up||Up||Up||Up||Up||Up</answer>")
    shown, reward, terminated, truncated, info = maze.step("no moves")
    assert "# " not in shown
    assert (terminated or truncated) is True
    assert info["is_valid"] is False
    assert reward == float(terminated)


def test_mazes_of_a_seed_are_equal_and_sizes_are_checked() -> None:
    mazes = [Maze(), Maze()]
    assert mazes[0].reset(seed=5) == mazes[1].reset(seed=5)
    assert mazes[0].canonical() == mazes[1].canonical()
    assert mazes[0].canonical().count("#") > 24
    with pytest.raises(UserError, match="got size 6"):
        Maze(size=6)
