"""A cell covers every choice that fits: by a row that is no worse, or by a facet of its tail that is no larger."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.search import rows
from meshwright.search.bound import Pipe, exact_values
from meshwright.search.enumeration import empty_rows
from meshwright.search.problem import to_exact
from meshwright.search.rows import Cell, Table
from tests.search.bruteforce import a_random_problem


def choices(table: Table, cell: Cell) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (strategies, F B g without what is received) of every choice that fits."""
    exact, layers = table.exact, range(cell.start, cell.end)
    found = []
    for plan in itertools.product(*(np.flatnonzero(table.allowed(layer, -1)) for layer in layers)):
        chosen = np.array(plan)
        memory = sum(int(exact.memory[cell.stage][layer, s]) for layer, s in zip(layers, plan, strict=True))
        gone, moments = 0, list[int]()
        for layer, s in reversed(list(zip(layers, plan, strict=True))):
            moments.append(int(exact.transient[layer, s]) - gone)
            gone += int(exact.freed[layer, s])
        memory += max(moments)
        if memory <= exact.budget[cell.stage]:
            found.append((chosen, table.row_of(cell, chosen, -1)))
    return found


def assert_covered(table: Table, cell: Cell, all_choices: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for plan, row in all_choices:
        entry, leaving = table.exact.layout[plan[[0, -1]]]
        alike = (cell.rows.exit == leaving) & ((cell.rows.entry == entry) | (cell.start == 0))
        if (cell.rows.values[alike] <= row).all(axis=1).any():
            continue
        received = table.received(cell.start)[:, :, entry] if cell.start else np.zeros((2, 1), int)
        for forward, backward in received.T:  # from each layout that may be handed in
            full = row + np.array([forward, backward, 0])
            values = exact_values(table.pipe, cell.stage, *full[:, None])
            assert (cell.facets <= values).all(axis=1).any()


@pytest.mark.parametrize("seed", range(100))
def test_cells_cover_every_choice(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_FEW_PLANS", 0)
    problem = a_random_problem(seed)
    stages, m = problem.num_stages, problem.num_micro_batches
    if stages == 1:
        return
    phased = problem.schedule == "gpipe"
    ahead = tuple(m if phased else min(m, stages - i) for i in range(stages))
    table = Table(to_exact(problem), Pipe(num_micro_batches=m, num_ahead=ahead, phased=phased), float("inf"))
    for stage, (start, end) in itertools.product(
        range(stages), itertools.combinations(range(problem.num_layers + 1), 2)
    ):
        if (start == 0) != (stage == 0) or (end == problem.num_layers) != (stage == stages - 1):
            continue
        cell = table.cell(stage, start, end, -1)
        here = Cell(**{**vars(cell), "start": start, "end": end}) if cell is not None else None
        probe = here or rows.Cell(
            stage=stage,
            start=start,
            end=end,
            key=0,
            key_weights=(1, 0),
            tail=None,
            facets=np.zeros((0, 7)),
            rows=empty_rows(end - start),
            extra=empty_rows(end - start),
        )
        fitting = choices(table, probe)
        if cell is None or here is None:
            assert not fitting
            continue
        assert_covered(table, here, fitting)
        if not cell.solved and not table.settle(cell, -1):
            assert not fitting
            continue
        for _ in range(4):
            assert_covered(table, Cell(**{**vars(cell), "start": start, "end": end}), fitting)
            if cell.tail is not None:
                table.deepen(cell, -1)
