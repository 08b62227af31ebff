"""The integer program equals dynamic programming equals trying everything; equation 2 has the closed form it is
given."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache
from itertools import product

import numpy as np
import pytest

from baton.planner.integer import maximise
from baton.planner.replicas import rounded_shares

Instance = tuple[list[float], list[list[int]], list[int]]


def instance(seed: int) -> Instance:
    draw = random.Random(seed)
    kinds, columns = draw.randint(1, 3), draw.randint(1, 5)
    rows = [[draw.randint(0, 3) for _ in range(columns)] for _ in range(kinds)]
    for column in range(columns):
        rows[draw.randrange(kinds)][column] += 1  # every replica takes some GPU
    return [draw.randint(1, 40) / 7 for _ in range(columns)], rows, [draw.randint(0, 9) for _ in range(kinds)]


def tried(gains: list[float], rows: list[list[int]], limits: list[int]) -> float:
    most = [range(min(n // r[c] for n, r in zip(limits, rows, strict=True) if r[c]) + 1) for c in range(len(gains))]
    return max(
        sum(g * y for g, y in zip(gains, counts, strict=True))
        for counts in product(*most)
        if all(sum(a * y for a, y in zip(row, counts, strict=True)) <= n for row, n in zip(rows, limits, strict=True))
    )


def tabulated(gains: list[float], rows: list[list[int]], limits: list[int]) -> float:
    """Best value of what is left, one replica after the other."""

    @cache
    def best(left: tuple[int, ...]) -> float:
        found = 0.0
        for column, gain in enumerate(gains):
            after = tuple(n - row[column] for n, row in zip(left, rows, strict=True))
            if min(after) >= 0:
                found = max(found, gain + best(after))
        return found

    return best(tuple(limits))


@pytest.mark.parametrize("seed", range(60))
def test_integer_program_equals_dynamic_programming_equals_brute_force(seed: int) -> None:
    gains, rows, limits = instance(seed)
    answer = maximise(np.array(gains), np.array(rows, dtype=float), np.array(limits, dtype=float))
    assert answer.value == pytest.approx(tried(gains, rows, limits), rel=1e-9)
    assert answer.value == pytest.approx(tabulated(gains, rows, limits), rel=1e-9)
    assert answer.bound == pytest.approx(answer.value, rel=1e-6)


def makespan(work: float, speeds: list[float], counts: tuple[int, ...]) -> float:
    """Equation 2 as printed: bisect Θ; a shape with y replicas may take x ≤ Θ·y·h."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        can = sum(middle * count * speed for count, speed in zip(counts, speeds, strict=True))
        low, high = (low, middle) if can >= work else (middle, high)
    return high


@pytest.mark.parametrize("seed", range(10))
def test_equation_2_is_a_knapsack(seed: int) -> None:
    gains, rows, limits = instance(seed)
    answer = maximise(np.array(gains), np.array(rows, dtype=float), np.array(limits, dtype=float))
    if answer.value > 0:
        assert makespan(1000.0, gains, answer.counts) == pytest.approx(1000 / answer.value)


def test_shares_are_rounded_by_largest_remainder() -> None:
    assert rounded_shares([0.5, 0.3, 0.2], 7) == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert sum(rounded_shares([1 / 3] * 3, 100)) == 100


def test_the_solver_prints_nothing() -> None:
    """In a process of its own: HiGHS 1.16 prints its version once per process, past Python's standard output."""
    code = (
        "import numpy as np; from baton.planner.integer import maximise; print('before'); "
        "maximise(np.ones(1), np.ones((1, 1)), np.ones(1)); print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("before\nafter\n", "")
