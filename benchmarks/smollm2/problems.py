"""Write the problems of recipes/smollm2-sums.toml: python benchmarks/smollm2/problems.py

Sums a + b and differences a - b with a result of at least 0, for a and b from 0 to 30, in the wording of reasoning-gym.
512 random problems are the test set; a + b and b + a are always in the same file. The files in this directory were made
by this script.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
LARGEST = 30
TESTED = 512


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows to train on, and the rows of the test set."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(a + 1)]
    groups = [[(f"{a} - {b}", a - b)] for a, b in pairs]
    groups += [[(f"{x} + {y}", a + b) for x, y in sorted({(a, b), (b, a)})] for a, b in pairs]
    random.Random(0).shuffle(groups)
    tested: list[dict[str, str]] = []
    trained: list[dict[str, str]] = []
    for group in groups:
        into = tested if len(tested) + len(group) <= TESTED else trained
        into += [
            {"prompt": f"State the final answer to the following arithmetic problem: {text} =", "answer": str(value)}
            for text, value in group
        ]
    return trained, tested


def main() -> None:
    """Write both files."""
    for name, rows in zip(("train", "test"), problems(), strict=True):
        lines = [json.dumps(row) + "\n" for row in rows]
        (HERE / f"sums-{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
