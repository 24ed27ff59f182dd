"""HiGHS behind two functions: a linear and an integer program from columns, one thread, fixed seed, nothing printed.

The same program and limits give the same answer on every run: the limits that matter are counts (nodes), and the
time limit is only the last resort.
"""

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from shared.errors import InvariantBroken

Floats = NDArray[np.float64]
SEED = 20250330


@dataclass(frozen=True, slots=True)
class Program:
    """Minimise cost @ x with row_low <= matrix @ x <= row_high and 0 <= x <= high. Matrix: dense [rows, columns]."""

    cost: Floats
    high: Floats
    matrix: NDArray[np.float64]
    row_low: Floats
    row_high: Floats


@dataclass(frozen=True, slots=True)
class LinearAnswer:
    """Of a linear program that has one."""

    cost: float
    values: Floats
    duals: Floats  # one per row


@dataclass(frozen=True, slots=True)
class IntegerAnswer:
    """Of an integer program: values of the best solution found, if any, and whether none can exist."""

    values: Floats | None
    bound: float  # no solution costs less
    optimal: bool
    infeasible: bool


def solve_linear(program: Program) -> LinearAnswer:
    """The optimum of a program that has one. Raises: InvariantBroken where HiGHS finds none."""
    solver = _solver(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise InvariantBroken(f"HiGHS: {solver.modelStatusToString(solver.getModelStatus())}")
    found = solver.getSolution()
    return LinearAnswer(
        solver.getInfo().objective_function_value, np.array(found.col_value), np.array(found.row_dual)
    )


def solve_integer(
    program: Program, *, time_limit_s: float, max_nodes: int, num_integer: int | None = None
) -> IntegerAnswer:
    """The best that is found within both limits; the first `num_integer` columns are whole numbers, None: all."""
    solver = _solver(program, program.cost.size if num_integer is None else num_integer)
    solver.setOptionValue("time_limit", max(time_limit_s, 0.01))
    solver.setOptionValue("mip_max_nodes", max_nodes)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 1e-6)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    values = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = np.array(solver.getSolution().col_value)
        values[:num_integer] = np.rint(values[:num_integer])
    optimal = status == highspy.HighsModelStatus.kOptimal
    return IntegerAnswer(values, info.mip_dual_bound, optimal, status == highspy.HighsModelStatus.kInfeasible)


def _solver(program: Program, num_integer: int = 0) -> highspy.Highs:
    rows, columns = program.matrix.shape
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.cost, np.zeros(columns), program.high
    lp.row_lower_, lp.row_upper_ = program.row_low, program.row_high
    where = np.nonzero(program.matrix.T)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, rows
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(where[0], minlength=columns)))).astype(
        np.int32
    )
    lp.a_matrix_.index_ = where[1].astype(np.int32)
    lp.a_matrix_.value_ = program.matrix.T[where]
    if num_integer:
        whole, rest = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole] * num_integer + [rest] * (columns - num_integer)
    solver = highspy.Highs()
    solver.silent()
    for option, value in (("threads", 1), ("random_seed", SEED)):
        solver.setOptionValue(option, value)
    solver.passModel(lp)
    return solver
