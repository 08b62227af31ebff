"""Integer programs, solved with HiGHS: maximise c·y subject to A·y ≤ b, with y non-negative integers."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.errors import UserError
from baton.planner.problem import Floats

TIME_LIMIT_S = 20.0


class IntegerSolution(msgspec.Struct, frozen=True):
    """The best solution found, and an upper bound on the optimal value."""

    counts: tuple[int, ...]
    value: float
    bound: float


def check_solver() -> None:
    """Raise UserError if HiGHS is not installed."""
    if find_spec("highspy") is None:
        raise UserError("planning needs highspy, which is not installed: run `pip install 'baton-rl[plan]'`")


def maximise(gains: Floats, rows: Floats, limits: Floats) -> IntegerSolution:
    """Solve one integer program. `rows` is [constraints, columns]; `gains`, `rows` and `limits` are non-negative.

    The solution is optimal (relative gap 10⁻⁹) unless the solver reaches its time limit. At the time limit, `bound` may
    exceed `value`.
    """
    import highspy

    num_rows, num_columns = rows.shape
    most = np.min(np.where(rows > 0, limits[:, None] / np.where(rows > 0, rows, 1.0), np.inf), axis=0, initial=np.inf)
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num_columns, num_rows
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = gains
    lp.col_lower_, lp.col_upper_ = np.zeros(num_columns), np.floor(most + 1e-9)
    lp.row_lower_, lp.row_upper_ = np.full(num_rows, -highspy.kHighsInf), limits.astype(float)
    columns, places = np.nonzero(rows.T)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(columns, np.arange(num_columns + 1))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = places, rows.T[columns, places]
    lp.integrality_ = [highspy.HighsVarType.kInteger] * num_columns
    _create_first_solver_silently()
    make: Any = highspy.Highs  # Any: highspy has no type annotations
    solver = make()
    for key, value in (
        ("output_flag", False),
        ("threads", 1),  # one thread, so that the same problem has the same solution
        ("mip_rel_gap", 1e-9),
        ("mip_abs_gap", 0.0),
        ("time_limit", TIME_LIMIT_S),
    ):
        solver.setOptionValue(key, value)
    solver.passModel(lp)
    solver.run()
    solution = np.round(np.array(solver.getSolution().col_value)) if solver.getInfo().primal_solution_status else None
    counts = np.zeros(num_columns) if solution is None or len(solution) != num_columns else solution
    assert np.all(rows @ counts <= limits + 1e-6), "HiGHS returned a solution that violates a limit"
    value = float(gains @ counts)
    bound = max(value, float(solver.getInfo().mip_dual_bound))
    return IntegerSolution(tuple(int(count) for count in counts), value, bound)


@cache
def _create_first_solver_silently() -> None:
    """Create the first solver of this process while standard output is discarded. HiGHS 1.16 prints its version when a
    process creates its first solver. This line would make the output of `baton plan --json` invalid JSON, and no option
    suppresses it."""
    import highspy

    make: Any = highspy.Highs
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (AttributeError, OSError, ValueError):  # standard output is closed
        make()
        return
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        make()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
