"""Lower bounds of the step time. The search orders hundreds of thousands of candidates by these bounds, and excludes
candidates whose bound is too long.

With fractional replicas, the optimum is at least as good as with whole replicas. A pool of n GPUs therefore generates
at most n · φ(T) tokens in time T, where φ(T) is the largest number of tokens per GPU that any shape generates in T. The
staleness bound limits the number of running trajectories to `gate`. A Lagrange multiplier λ ≥ 0 (tokens per running
trajectory) replaces this limit: φ_λ(T) is the maximum over all replica shapes of (tokens in T − λ · concurrent
trajectories) / GPUs, but at least 0. By weak duality, no set of replicas generates more than Σ n · φ_λ(T) + λ · `gate`
tokens in T.
"""

from __future__ import annotations

import numpy as np

from baton.planner.problem import AssignmentProblem, Floats, Ints

GRID = 1500
"""Number of values of T at which φ(T) is tabulated. φ is convex, so linear interpolation lies above φ and the bound
holds."""
PRICES = 7
"""Number of values of λ to try, including 0."""
DUALS = 201
"""Number of weights w for which `division_bound_s` tests its inequality."""


class RolloutBound:
    """Lower bounds on the rollout time, given the number of GPUs of each pool."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self.tokens, gate = problem.step.output_tokens, problem.step.max_running
        self._num_pools = len(problem.pools.pools)
        self._columns = problem.columns
        pauses = [column.cost.pause_s for column in problem.columns] or [0.0]
        rates = [column.cost.tokens_per_s / column.num_gpus for column in problem.columns] or [1.0]
        gpus = sum(pool.num_gpus for pool in problem.pools.pools)
        low = self.tokens / (gpus * max(rates))
        high = (self.tokens / min(rates) + max(pauses)) * 4  # the time of one GPU of the slowest shape, with a margin
        self.times = np.geomspace(low, high, GRID)
        prices = [0.0]
        if np.isfinite(gate) and self._columns:
            middle = float(np.sqrt(self.times[0] * self.times[-1]))
            highest = max(column.work(middle) / column.cost.batch for column in self._columns)
            prices += [highest * 2.0**-power for power in range(PRICES - 1)]
        self.tables = [(self._table(price), price * gate if price else 0.0) for price in prices]
        """For each λ: φ_λ at each of `times`, shape [pools, times], and λ · `gate`."""

    def _table(self, price: float) -> Floats:
        """Return φ_λ(T) for λ = `price`, shape [pools, times]."""
        best = np.zeros((self._num_pools, GRID))
        for column in self._columns:
            work = column.cost.tokens_per_s * np.maximum(0.0, self.times - column.cost.pause_s)
            gain = (work - price * column.cost.batch) / column.num_gpus
            np.maximum(best[column.pool], gain, out=best[column.pool])
        return best

    def times_s(self, gpus: Floats | Ints) -> Floats:
        """Return lower bounds on the rollout time [candidates], for `gpus` [candidates, pools]."""
        roots = [self._root(gpus.astype(float), *each) for each in self.tables]
        least: Floats = np.max(roots, axis=0)
        return least

    def work(self, time_s: float) -> list[tuple[Floats, float]]:
        """Return for each λ two values: φ_λ(`time_s`) [pools], and λ · `gate` (symbols: see the head of this file)."""
        works = [np.array([np.interp(time_s, self.times, row) for row in table]) for table, _ in self.tables]
        return [(work, gated) for work, (_, gated) in zip(works, self.tables, strict=True)]

    def _root(self, gpus: Floats, table: Floats, constant: float) -> Floats:
        low, high = np.zeros(len(gpus), dtype=int), np.full(len(gpus), GRID - 1, dtype=int)
        reaches = np.einsum("np,p->n", gpus, table[:, -1]) + constant >= self.tokens
        while np.any(high - low > 1):
            middle = (low + high) // 2
            enough = np.einsum("np,pn->n", gpus, table[:, middle]) + constant >= self.tokens
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        before = np.einsum("np,pn->n", gpus, table[:, low]) + constant
        after = np.einsum("np,pn->n", gpus, table[:, high]) + constant
        part = np.clip((self.tokens - before) / np.maximum(after - before, 1e-9 * self.tokens), 0.0, 1.0)
        root = self.times[low] + part * (self.times[high] - self.times[low])
        root = np.where(before >= self.tokens, 0.0, root)
        return np.where(reaches, root, np.inf)


def division_bound_s(problem: AssignmentProblem) -> float:
    """Return a lower bound on the step time of every division of the GPUs between trainer and rollout.

    In time T, a GPU of pool k either trains ρ_k·T batches or generates the fraction φ_k(T)/tokens of a batch. All GPUs
    together must train at least one batch and generate at least one batch. For every weight w in [0, 1], therefore,
    Σ n_k · max(w·ρ_k·T, (1 − w)·φ_k(T)/tokens) ≥ 1.
    """
    bound = RolloutBound(problem)
    count = np.array([pool.num_gpus for pool in problem.pools.pools], dtype=float)
    step = problem.step
    if not step.overlaps:
        return float(serial_bound_s(problem, bound, count[None])[0])
    weights = np.linspace(0, 1, DUALS)[:, None]

    def can(time_s: float) -> bool:
        left = time_s - problem.sync_bound_s
        rollout_s = left - step.latency_s
        if rollout_s < step.scoring_s or left <= 0:
            return False
        train = problem.train_rate_bound * left
        for work, gated in bound.work(rollout_s):
            both = np.maximum(weights * train, (1 - weights) * work / bound.tokens)
            if np.any(both @ count + (1 - weights[:, 0]) * gated / bound.tokens < 1):
                return False
        return True

    alone_s = 1 / float(problem.train_rate_bound.min())
    low, high = 0.0, float(max(bound.times[-1], alone_s) * 2 + problem.sync_bound_s + step.scoring_s + step.latency_s)
    if not can(high):
        return np.inf
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if can(middle) else (middle, high)
    return low


def serial_bound_s(problem: AssignmentProblem, bound: RolloutBound, gpus: Floats) -> Floats:
    """Return lower bounds on the step time [candidates] of clusters of `gpus` [candidates, pools], if generation and
    training do not overlap: all GPUs generate, then all GPUs train."""
    train_s = 1 / (gpus @ problem.train_rate_bound)
    least: Floats = problem.step.step_s(problem.sync_bound_s, bound.times_s(gpus), train_s)
    return least
