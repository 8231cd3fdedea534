"""Whole plans out of the rows that a way chooses, their stages' seconds, and their simulated step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.simulate import simulate_many
from meshwright.search.labels import Ints, present
from meshwright.search.one_stage import Plan
from meshwright.search.recursion import Cells, Way, received_by
from meshwright.search.rows import Table


def plan_of_rows(way: Way) -> Plan:
    """Return the plan of a way without tails."""
    strategies = [int(s) for step in way.steps for s in step.cell.rows.plans[step.row]]
    return (0, *(step.end for step in way.steps)), tuple(strategies)


def plan_at(cells: Cells, cuts: NDArray[np.intp], rows: NDArray[np.intp]) -> Plan:
    """Return the plan of one row for each stage of a cut."""
    strategies: list[int] = []
    for stage, row in enumerate(rows):
        cell = cells[stage][int(cuts[stage])][int(cuts[stage + 1])]
        strategies.extend(int(s) for s in cell.rows.plans[row])
    return tuple(int(cut) for cut in cuts), tuple(strategies)


def stage_times(table: Table, tied: int, plan: Plan) -> Ints:
    """Return [3, stage] integer F, B, g of a plan."""
    cuts, strategies = plan
    layouts = table.exact.layout[np.array(strategies)]
    columns: list[Ints] = []
    for stage, (start, end) in enumerate(pairwise(cuts)):
        cell = present(table.cell(stage, start, end, tied))
        here = replace(cell, start=start, end=end)
        row = table.row_of(here, np.array(strategies[start:end]), tied)
        if start:
            received = present(received_by(table, start, int(layouts[start - 1])))
            row[:2] += received[:, layouts[start]]
        columns.append(row)
    return np.stack(columns, axis=1)


def simulated(table: Table, times: Ints) -> Ints:
    """Return [plan] step times from [plan, 3, stage] F, B, g."""
    source, (forward, backward, step) = table.exact.source, times.transpose(1, 0, 2)
    return np.asarray(simulate_many(source.schedule, forward, backward, step, source.num_micro_batches), np.int64)
