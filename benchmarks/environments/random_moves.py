"""Share of Sokoban rooms that uniformly random moves solve, and the lengths of shortest solutions."""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "environments"))
from test_sokoban import shortest_solution

from baton.environments.grid import MOVES
from baton.environments.sokoban import Room, generate_room

RESULTS = Path(__file__).parent / "results"
SETTINGS = {  # name: size, boxes, search depth, moves of an episode
    "5x5, 1 box": (5, 1, 100, 10),
    "6x6, 1 box (SimpleSokoban)": (6, 1, 100, 10),
    "6x6, 2 boxes (LargerSokoban6)": (6, 2, 20, 100),
}


def is_solved_at_random(room: Room, num_moves: int, dice: random.Random) -> bool:
    """Whether `num_moves` random moves solve a room."""
    for _ in range(num_moves):
        room = room.moved(dice.choice(list(MOVES)))
        if room.is_solved:
            return True
    return False


def main() -> None:
    """Measure all settings and write the table."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rooms", type=int, default=800)
    arguments.add_argument("--attempts", type=int, default=10)
    given = arguments.parse_args()
    rows = []
    for name, (size, boxes, depth, num_moves) in SETTINGS.items():
        rooms = [generate_room(seed, size=size, num_boxes=boxes, search_depth=depth) for seed in range(given.rooms)]
        lengths = sorted(len(shortest_solution(room) or []) for room in rooms)
        dice = random.Random(0)
        shares = [
            sum(is_solved_at_random(room, num_moves, dice) for _ in range(given.attempts)) / given.attempts
            for room in rooms
        ]
        mean = sum(shares) / len(shares)
        error = math.sqrt(sum((share - mean) ** 2 for share in shares) / (len(shares) - 1) / len(shares))
        rows.append(
            {
                "setting": name,
                "moves": num_moves,
                "solved": mean,
                "standard_error_over_rooms": error,
                "shortest_median": lengths[len(lengths) // 2],
                "shortest_p90": lengths[int(0.9 * len(lengths))],
                "distinct_rooms": len({room.canonical for room in rooms}),
            }
        )
        print(json.dumps(rows[-1]))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=True)
    RESULTS.mkdir(exist_ok=True)
    result = {"commit": commit.stdout.strip(), "rooms": given.rooms, "attempts": given.attempts, "rows": rows}
    (RESULTS / "random_moves.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
