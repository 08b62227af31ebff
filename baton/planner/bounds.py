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
from numpy.typing import NDArray

from baton.planner.problem import AssignmentProblem, Floats

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
        self.tokens, self.gate = problem.step.output_tokens, problem.step.max_running
        self._num_pools = len(problem.pools.pools)
        self._columns = problem.columns
        pauses = [column.cost.pause_s for column in problem.columns] or [0.0]
        rates = [column.cost.tokens_per_s / column.num_gpus for column in problem.columns] or [1.0]
        gpus = sum(pool.num_gpus for pool in problem.pools.pools)
        low = self.tokens / (gpus * max(rates))
        high = (self.tokens / min(rates) + max(pauses)) * 4  # the time of one GPU of the slowest shape, with a margin
        self.times = np.geomspace(low, high, GRID)
        self.prices = self._choose_prices()
        self.tables = [self._table(price) for price in self.prices]

    def _choose_prices(self) -> list[float]:
        if not np.isfinite(self.gate) or not self._columns:
            return [0.0]
        middle = float(np.sqrt(self.times[0] * self.times[-1]))
        highest = max(column.work(middle) / column.cost.batch for column in self._columns)
        return [0.0, *(highest * 2.0**-power for power in range(PRICES - 1))]

    def _table(self, price: float) -> Floats:
        """Return φ_λ(T) for λ = `price`, shape [pools, times]."""
        best = np.zeros((self._num_pools, GRID))
        for column in self._columns:
            work = column.cost.tokens_per_s * np.maximum(0.0, self.times - column.cost.pause_s)
            gain = (work - price * column.cost.batch) / column.num_gpus
            np.maximum(best[column.pool], gain, out=best[column.pool])
        return best

    def times_s(self, gpus: NDArray[np.int64]) -> Floats:
        """Return lower bounds on the rollout time [candidates], for `gpus` [candidates, pools]."""
        least = np.zeros(len(gpus))
        for price, table in zip(self.prices, self.tables, strict=True):
            least = np.maximum(least, self._root(gpus.astype(float), table, price * self.gate if price else 0.0))
        return least

    def work(self, time_s: float) -> list[Floats]:
        """Return φ_λ(`time_s`), shape [pools], for each λ of `prices`."""
        return [np.array([np.interp(time_s, self.times, row) for row in table]) for table in self.tables]

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
    weights = np.linspace(0, 1, DUALS)[:, None]

    def can(time_s: float) -> bool:
        left = time_s - problem.sync_bound_s
        rollout_s = left - step.latency_s
        if rollout_s < step.judge_s or left <= 0:
            return False
        train = problem.train_rate_bound * left
        for price, work in zip(bound.prices, bound.work(rollout_s), strict=True):
            spare = price * bound.gate / bound.tokens if price else 0.0
            both = np.maximum(weights * train, (1 - weights) * work / bound.tokens)
            if np.any(both @ count + (1 - weights[:, 0]) * spare < 1):
                return False
        return True

    alone_s = 1 / float(problem.train_rate_bound.min())
    low, high = 0.0, float(max(bound.times[-1], alone_s) * 2 + problem.sync_bound_s + step.judge_s + step.latency_s)
    if not step.overlaps:
        return _serial_bound_s(problem, bound, count)
    if not can(high):
        return np.inf
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if can(middle) else (middle, high)
    return low


def _serial_bound_s(problem: AssignmentProblem, bound: RolloutBound, count: Floats) -> float:
    train_s = 1 / max(float(count @ problem.train_rate_bound), 1e-300)
    rollout_s = float(bound.times_s(count[None, :].astype(np.int64))[0])
    return float(problem.sync_bound_s + train_s + max(rollout_s, problem.step.judge_s) + problem.step.latency_s)
