"""Sokoban: rooms have solutions, rewards are RAGEN's, and rooms that differ by a symmetry are one problem."""

from __future__ import annotations

import re
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.environments.grid import MOVES, read_moves
from baton.environments.sokoban import SYMBOLS, Room, Sokoban, generate_room
from baton.errors import UserError

ROOM = """\
#####
#@$.#
#---#
#---#
#####"""


def room_of(text: str) -> Room:
    """Read a room in the ASCII symbols."""
    rows = text.splitlines()
    cells = {(r, c): SYMBOLS["ascii"].index(symbol) for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    floor, targets, boxes, (player,) = (
        frozenset(cell for cell, kind in cells.items() if kind in kinds)
        for kinds in ({1, 2, 3, 4, 5, 6}, {2, 3, 6}, {3, 4}, {5, 6})
    )
    return Room(len(rows), floor, targets, boxes, player)


def turned(text: str) -> str:
    return "\n".join("".join(column) for column in zip(*text.splitlines()[::-1], strict=True))


def shortest_solution(room: Room) -> list[str] | None:
    """Return a shortest list of moves that solves a room; None if there is none."""
    start: tuple[Room, list[str]] = (room, [])
    queue, seen = deque([start]), {(room.player, room.boxes)}
    while queue:
        state, moves = queue.popleft()
        if state.is_solved:
            return moves
        for move in MOVES:
            after = state.moved(move)
            if (after.player, after.boxes) not in seen:
                seen.add((after.player, after.boxes))
                queue.append((after, [*moves, move]))
    return None


@pytest.mark.parametrize(("size", "boxes", "depth"), [(5, 1, 100), (6, 1, 100), (6, 2, 20), (8, 2, 10)])
def test_every_room_has_a_solution_and_starts_unsolved(size: int, boxes: int, depth: int) -> None:
    for seed in range(40):
        room = generate_room(seed, size=size, num_boxes=boxes, search_depth=depth)
        assert len(room.boxes) == len(room.targets) == boxes
        assert not room.boxes & room.targets
        assert shortest_solution(room)


def test_the_room_of_a_seed_never_changes() -> None:
    rooms = [generate_room(seed, size=6, num_boxes=1, search_depth=100) for seed in range(200)]
    assert rooms[7].drawn(SYMBOLS["ascii"]).splitlines() == ["######", "###--#", "###-$#", "##-@.#", "###--#", "######"]
    assert len({room.canonical for room in rooms}) > 150


def test_a_solution_solves_and_its_rewards_are_those_of_ragen() -> None:
    environment = Sokoban(max_turns=3, actions_per_turn=2, size=6)
    first = environment.reset(seed=7)
    assert first.startswith("Turn 1:\nState:\n######\n")
    assert first.endswith("You have 6 actions left.")
    solution = shortest_solution(generate_room(7, size=6, num_boxes=1, search_depth=100))
    assert solution is not None
    total, ended = 0.0, False
    for start in range(0, len(solution), 2):
        assert not ended
        text = f"<think>…</think><answer>{' || '.join(solution[start : start + 2])}</answer>"
        observation, reward, ended, _, info = environment.step(text)
        total += reward
    assert ended
    assert info["success"]
    assert "√" in observation
    assert total == pytest.approx(-0.1 * len(solution) + 1 + 10)


def test_names_that_are_no_moves_cost_once_and_turns_are_limited() -> None:
    environment = Sokoban(max_turns=2, actions_per_turn=5)
    environment.reset(seed=1)
    assert environment.step("I go up")[1] == pytest.approx(-0.1)
    _, reward, terminated, truncated, info = environment.step("<answer>up || jump</answer>")
    assert reward == pytest.approx(-0.2)
    assert (terminated, truncated, info["success"], info["is_valid"]) == (False, True, False, False)


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "Up", "||", "down", " ", "<", "answer>"])).map("".join))
def test_the_last_closed_answer_counts(action: str) -> None:
    answers = re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL)
    names = [name.strip().capitalize() for name in answers[-1].split("||")] if answers else []
    assert read_moves(action, "ragen")[0] == [name for name in names if name in MOVES]


def test_many_tags_that_are_not_closed_take_no_quadratic_time() -> None:
    """With the regular expression above, this test would take minutes."""
    assert read_moves("<answer>" * 300_000, "ragen") == ([], False)


def test_moves_beyond_the_limit_of_a_turn_or_an_episode_are_not_executed() -> None:
    environment = Sokoban(size=5, max_turns=5, actions_per_turn=3, max_actions=4, form="compact", rewards="success")
    environment.reset(seed=1)
    assert environment.step("UDUDUDUD")[3] is False
    observation, reward, terminated, truncated, _ = environment.step("UDUD")
    assert terminated or truncated, "4 moves are the episode's"
    assert reward == float(terminated)
    assert observation.count("\n") == 2, "the outer wall is not shown"


def test_pushes() -> None:
    room = room_of(ROOM)
    assert room.moved("Up") is room
    pushed = room.moved("Right")
    assert pushed.is_solved
    assert pushed.drawn(SYMBOLS["ascii"]).splitlines()[1] == "#-@*#"
    assert pushed.moved("Right") == pushed, "a box is not pushed into a wall"
    assert shortest_solution(room) == ["Right"]
    assert shortest_solution(room_of(ROOM.replace("@$.", "$@."))) is None


def test_the_canonical_form_is_equal_for_all_symmetries_and_no_others() -> None:
    text, forms = ROOM, set()
    for _ in range(4):
        text = turned(text)
        forms |= {text, "\n".join(row[::-1] for row in text.splitlines())}
    assert len(forms) == 8
    assert len({room_of(form).canonical for form in forms}) == 1
    assert room_of(ROOM.replace("$.", ".$")).canonical not in {room_of(ROOM).canonical}


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="got size 3, boxes 1"):
        Sokoban(size=3)
    with pytest.raises(UserError, match="got form 'short'"):
        Sokoban(form="short")  # type: ignore[arg-type]
