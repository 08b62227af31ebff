"""Phase 1, rollout side: the number of replicas of each shape, as an integer program.

y is the number of replicas of a shape, h the speed of one replica. Equation 2 of AReaL-Hex is bilinear, because it
multiplies y by the work of a replica. The optimal work is known, however: with work proportional to speed, all replicas
end at the same time Θ = tokens / Σ y·h. The remaining problem, max Σ y·h with the available GPUs, is a knapsack with
one dimension per pool. A replica that pauses r seconds per step generates h·(Θ − r) tokens. Newton's method therefore
finds the least Θ with max Σ y·h·(Θ − r) ≥ tokens; each iteration solves one knapsack.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.planner.integer import IntegerSolution, maximise
from baton.planner.problem import AssignmentProblem, Bools, Floats, Ints

CLOSE = 1e-9
"""Relative difference below which two times count as equal."""


class RolloutAllocation(msgspec.Struct, frozen=True):
    """Replicas, and the time in which they generate a step's tokens."""

    counts: tuple[int, ...]
    """Number of replicas of each shape in `AssignmentProblem.columns`."""
    time_s: float
    least_s: float
    """Lower bound on the rollout time of any choice of replicas. Equal to `time_s`, unless the solver reached its time
    limit."""


class RolloutProgram:
    """The integer programs of one problem; results are cached."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self._step, self._columns, self._pools = problem.step, problem.columns, problem.pools.pools
        self._trained, self._groups = problem.table.gpus, problem.table.groups
        self._rows = [(pool, level) for pool in range(len(self._pools)) for level in self._pools[pool].levels]
        self._speed = np.array([column.cost.tokens_per_s for column in problem.columns])
        self._pause = np.array([column.cost.pause_s for column in problem.columns])
        self._batch = np.array([float(column.cost.batch) for column in problem.columns])
        self._gpus = np.array([column.num_gpus for column in problem.columns], dtype=float)
        self._pool = np.array([column.pool for column in problem.columns], dtype=int)
        pools, levels = np.array(self._rows).T[:, :, None]
        self._matrix = np.where((self._pool == pools) & (self._gpus >= levels), self._gpus, 0.0)
        """[rows, columns] number of GPUs of a replica that count for this pool and level."""
        self._best: dict[tuple[object, ...], RolloutAllocation | None] = {}
        self._most: dict[tuple[object, ...], IntegerSolution] = {}

    def left(self, row: int | None) -> tuple[int, ...]:
        """Return how many GPUs the training shape in this table row leaves; without a row, return how many there are.
        The result has one number for each pool and level: the number of GPUs usable in groups of `level` GPUs."""
        room = [self._pools[pool].capacity(level) for pool, level in self._rows]
        if row is not None:
            gpus, groups = self._trained[row].tolist(), self._groups[row].tolist()
            room = [num - gpus[k] * (groups[k] >= level) for num, (k, level) in zip(room, self._rows, strict=True)]
        return tuple(room)

    def less(self, left: tuple[int, ...], counts: Sequence[int]) -> tuple[int, ...]:
        """Subtract the GPUs of `counts` replicas of each shape from `left`. If the replicas do not fit, a value of the
        result is negative."""
        used = self._matrix @ np.array(counts)
        return tuple(int(room - taken) for room, taken in zip(left, used, strict=True))

    def reaches(self, left: tuple[int, ...], allowed: tuple[bool, ...], time_s: float) -> IntegerSolution:
        """Return the replicas on `allowed` pools that generate the most tokens within `time_s`."""
        key = left, allowed, time_s
        if key not in self._most:
            self._most[key] = self._solve(left, allowed, time_s)
        return self._most[key]

    def fastest(self, left: tuple[int, ...], allowed: tuple[bool, ...], least_s: float) -> RolloutAllocation | None:
        """Return the replicas on `allowed` pools that generate a step's tokens in the shortest time, or None if no
        replica fits. `least_s` is the shortest useful rollout time: shorter rollouts are impossible or do not shorten
        the step."""
        key = left, allowed, least_s
        if key not in self._best:
            self._best[key] = self._newton(left, allowed, least_s)
        return self._best[key]

    def _newton(self, left: tuple[int, ...], allowed: tuple[bool, ...], least_s: float) -> RolloutAllocation | None:
        tokens = self._step.output_tokens
        usable = self._usable(left, allowed)
        if not usable.any():
            return None
        # no replica generates tokens within its pause, so the search starts just above the shortest pause
        time_s = max(least_s, float(self._pause[usable].min()) * (1 + 1e-6) + 1e-9)
        answer = self.reaches(left, allowed, time_s)
        if time_s == least_s and answer.value >= tokens * (1 - CLOSE):
            return RolloutAllocation(answer.counts, least_s, least_s)
        for _ in range(60):
            counts = np.array(answer.counts)
            works = (counts > 0) & (self._pause < time_s)
            speed = float((counts * self._speed)[works].sum())
            if speed <= 0:
                return None
            following = (tokens + float((counts * self._speed * self._pause)[works].sum())) / speed
            if following >= time_s * (1 - CLOSE) and answer.value >= tokens * (1 - CLOSE):
                break
            time_s = following
            answer = self.reaches(left, allowed, time_s)
        below = time_s * min(1.0, tokens / answer.bound) if answer.bound > answer.value * (1 + 1e-6) else time_s
        return RolloutAllocation(answer.counts, time_s, below)

    def _usable(self, left: tuple[int, ...], allowed: tuple[bool, ...]) -> Bools:
        room = np.array(left, dtype=float)
        fits = np.all(self._matrix <= room[:, None], axis=0)
        usable: Bools = fits & np.array(allowed, dtype=bool)[self._pool]
        return usable & (self._batch <= self._step.max_running)

    def _solve(self, left: tuple[int, ...], allowed: tuple[bool, ...], time_s: float) -> IntegerSolution:
        gains = self._speed * np.maximum(0.0, time_s - self._pause)
        usable: Ints = np.nonzero(self._usable(left, allowed) & (gains > 0))[0].astype(np.int64)
        kept = self._undominated(usable, gains, left)
        counts = np.zeros(len(self._columns), dtype=int)
        if not len(kept):
            return IntegerSolution(tuple(counts.tolist()), 0.0, 0.0)
        rows, limits = self._matrix[:, kept], np.array(left, dtype=float)
        if np.isfinite(self._step.max_running):
            rows, limits = np.vstack([rows, self._batch[kept]]), np.append(limits, self._step.max_running)
        matters = np.any(rows > 0, axis=1)
        answer = maximise(gains[kept], rows[matters], limits[matters])
        counts[kept] = answer.counts
        return IntegerSolution(tuple(counts.tolist()), answer.value, answer.bound)

    def _undominated(self, usable: Ints, gains: Floats, left: tuple[int, ...]) -> Ints:
        """Return the columns that no other column dominates. Column a dominates column b of the same pool if a
        generates at least as many tokens as b, and needs neither more GPUs nor GPUs in larger groups. If the
        staleness bound may limit the running trajectories, a must also run at most as many trajectories as b."""
        room = dict(zip(self._rows, left, strict=True))
        slots = sum(
            room[pool, 1] * max((self._batch[c] / self._gpus[c] for c in usable if self._pool[c] == pool), default=0.0)
            for pool in range(len(self._pools))
        )
        gate = slots > self._step.max_running
        by_gain = usable[np.lexsort((self._batch[usable], self._gpus[usable], -gains[usable]))]
        is_kept = np.zeros(len(by_gain), dtype=bool)
        for pool in set(self._pool[by_gain].tolist()):
            own = np.nonzero(self._pool[by_gain] == pool)[0]
            used, batch = self._matrix[:, by_gain[own]], self._batch[by_gain[own]]
            used = used[used.any(axis=1)]
            dominates = np.all(used[:, :, None] <= used[:, None, :], axis=0)  # [a, b]
            if gate:
                dominates &= batch[:, None] <= batch
            # the relation is transitive, so it does not matter whether column a itself is dominated
            is_kept[own] = ~np.triu(dominates, 1).any(axis=0)
        return by_gain[is_kept]


def rounded_shares(shares: Sequence[float], total: int) -> list[int]:
    """Round shares of `total` to whole numbers by largest remainder."""
    exact = [share * total for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts
