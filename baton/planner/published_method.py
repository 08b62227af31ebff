"""Phase 2, `paper`: equation 3 and bisection on γ, as published in AReaL-Hex (2511.00796), section 4.3 and algorithm 1.

γ is the target for the training side's share of FLOP/s. The method serves as a baseline. Equation 3 selects many GPUs
with fast links instead of few GPUs that train fast: on the paper's 56 GPUs, it selects 40 H20 for training instead of 8
H800. The paper leaves three points open, which this module decides. First, how close to γ the training side's share of
FLOP/s must be. This module sorts the shares of all divisions; the difference from γ may be at most half of the largest
gap between two neighbours. Second, whether a side may have no GPU: training and rollout have at least one GPU each.
Third, what the search returns: the best plan that it found.
"""

from __future__ import annotations

from itertools import pairwise, product

import msgspec
import numpy as np

from baton.planner.exact import Solution, solution
from baton.planner.pools import GpuPool
from baton.planner.problem import AssignmentProblem, Bools, Floats, Ints
from baton.planner.replicas import CLOSE, RolloutProgram

STABLE = 20
"""The search stops after this number of iterations without improvement (K in the paper)."""
MAX_DIVISIONS = 50_000
"""Maximum number of divisions. If there are more divisions in steps of one GPU, the method considers only divisions in
steps of whole nodes or of several nodes."""


def objectives(problem: AssignmentProblem, rows: Ints) -> Floats:
    """Return the value of equation 3 for each division: the training side's share of link bandwidth plus the rollout
    side's share of memory bandwidth.

    The link bandwidth is summed over all pairs of GPUs. In each division, the first `rows[:, k]` GPUs of pool k train,
    node by node.
    """
    everything = np.array([[pool.num_gpus for pool in problem.pools.pools]], dtype=np.int64)
    links = _pair_sums(problem, rows) / _pair_sums(problem, everything)
    speeds = np.array([pool.place.gpu.hbm_bytes_per_s for pool in problem.pools.pools])
    scores: Floats = links + ((everything - rows) @ speeds) / (everything @ speeds)
    return scores


def _pair_sums(problem: AssignmentProblem, rows: Ints) -> Floats:
    pools = problem.pools.pools
    total = np.zeros(len(rows))
    for k, pool in enumerate(pools):
        on_own_node = [0, *(earlier for size in pool.sizes for earlier in range(size))]
        within = np.cumsum(on_own_node)[rows[:, k]]  # pairs on the same node
        pairs = rows[:, k] * (rows[:, k] - 1) / 2
        total += within * pool.place.link_bytes_per_s + (pairs - within) * pool.place.inter_bytes_per_s
        for other in range(k + 1, len(pools)):
            total += rows[:, k] * rows[:, other] * problem.pools.bytes_per_s[k][other]
    return total


def divisions(problem: AssignmentProblem) -> Ints:
    """Return the numbers of GPUs that train, [divisions, pools], in steps of one GPU, one node or several nodes."""
    pools = problem.pools.pools
    steps = [list(range(pool.num_gpus + 1)) for pool in pools]
    stride = 1
    while np.prod([len(own) for own in steps], dtype=float) > MAX_DIVISIONS:
        edges = [np.cumsum([0, *pool.sizes]).tolist() for pool in pools]
        steps = [sorted({*own[::stride], own[-1]}) for own in edges]
        stride += 1
    rows = np.array(list(product(*steps)), dtype=np.int64)
    total = sum(pool.num_gpus for pool in pools)
    mixed: Ints = rows[(rows.sum(axis=1) > 0) & (rows.sum(axis=1) < total)]
    return mixed


def propose(problem: AssignmentProblem, gamma: float, rows: Ints, scores: Floats) -> Ints:
    """Return the division with the highest value of equation 3, among the divisions whose training share of FLOP/s is
    close to γ (see the module's docstring)."""
    flops = np.array([pool.place.gpu.flops for pool in problem.pools.pools])
    share = rows @ flops / (np.array([pool.num_gpus for pool in problem.pools.pools]) @ flops)
    reach = np.sort(np.unique(np.round(share, 9)))
    tolerance = float(np.diff(reach).max(initial=0.0)) / 2
    near = np.abs(share - gamma) <= max(tolerance, float(np.abs(share - gamma).min())) + 1e-9
    best: Ints = rows[near][int(np.argmax(scores[near]))]
    return best


def solve_paper(problem: AssignmentProblem) -> Solution | None:
    """Return the best division found by equation 3 and bisection on γ."""
    rows = divisions(problem)
    scores = objectives(problem, rows)
    program = RolloutProgram(problem)
    low, high, best, stable = 0.0, 1.0, None, 0
    total = sum(pool.num_gpus for pool in problem.pools.pools)
    while stable < STABLE and high - low > 1 / (4 * total):
        gamma = (low + high) / 2
        division = propose(problem, gamma, rows, scores)
        found = evaluate_division(problem, program, division)
        if found is None:  # one side has no feasible shape: change γ so that this side gets more GPUs
            low, high = (low, gamma) if _rows_within(problem, division).any() else (gamma, high)
            continue
        train_s = float(problem.table.time_s[found.row])
        if train_s < found.rollout.time_s + problem.step.reward_s(found.rollout.time_s):
            high = gamma
        else:
            low = gamma
        if best is None or found.step_s < best.step_s * (1 - CLOSE):
            best, stable = found, 0
        else:
            stable += 1
    return best


def _rows_within(problem: AssignmentProblem, train: Ints) -> Bools:
    """Return which training shapes fit into the first `train[k]` GPUs of each pool k."""
    table = problem.table
    fits = np.ones(len(table), dtype=bool)
    gpus, groups = table.gpus, table.groups
    for k, pool in enumerate(problem.pools.pools):
        taken, _ = _divided(pool, int(train[k]))
        for level in np.unique(groups[:, k]).tolist():
            if level:
                fits &= (groups[:, k] != level) | (gpus[:, k] <= taken.capacity(level))
    return fits


def _divided(pool: GpuPool, count: int) -> tuple[GpuPool, GpuPool]:
    """Divide a pool into its first `count` GPUs and its other GPUs. A node may have 0 GPUs in a part."""
    ends = np.minimum(np.cumsum([0, *pool.sizes]), count).tolist()
    taken = tuple(after - before for before, after in pairwise(ends))
    rest = tuple(size - own for size, own in zip(pool.sizes, taken, strict=True))
    return msgspec.structs.replace(pool, sizes=taken), msgspec.structs.replace(pool, sizes=rest)


def evaluate_division(problem: AssignmentProblem, program: RolloutProgram, train: Ints) -> Solution | None:
    """Return the fastest training shape and replicas of a given division; None if no shape or no replica fits."""
    fits = np.nonzero(_rows_within(problem, train))[0]
    if not len(fits):
        return None
    left = []
    for k, pool in enumerate(problem.pools.pools):
        _, rest = _divided(pool, int(train[k]))
        left += [rest.capacity(level) for level in pool.levels]
    row = int(fits[np.argmin(problem.table.time_s[fits])])
    rollout = program.fastest(tuple(left), (True,) * len(problem.pools.pools), problem.step.scoring_s)
    return None if rollout is None else solution(problem, row, rollout)
