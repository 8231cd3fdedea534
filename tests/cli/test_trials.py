"""Plans that break their ranks do not keep the others from running."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

import meshwright
from meshwright.cli import trials as cli
from meshwright.files import read_spec, write_spec
from meshwright.report.trials import trials_table, winner
from meshwright.runtime import launch
from meshwright.search.finalists import finalists
from meshwright.search.planner import make_request
from meshwright.spec.trial import Trial, Trials


@pytest.fixture(scope="module")
def plans() -> tuple[meshwright.Plan, ...]:
    found = finalists(make_request("tiny-llama", "2xcpu", global_batch=4, seq_len=32), 4)
    assert isinstance(found, tuple)
    return found


def test_finalists_differ_and_the_best_comes_first(plans: tuple[meshwright.Plan, ...]):
    best = meshwright.plan("tiny-llama", "2xcpu", global_batch=4, seq_len=32)
    assert isinstance(best, meshwright.Found)
    assert len(plans) == 4
    assert plans[0].stages == best.plan.stages
    assert len({(plan.stages, plan.num_micro_batches) for plan in plans}) == 4
    times = [plan.predicted.step_s for plan in plans if plan.predicted is not None]
    assert times == sorted(times)


def test_a_plan_that_breaks_its_ranks_is_marked_and_passed_over(
    plans: tuple[meshwright.Plan, ...], monkeypatch: pytest.MonkeyPatch
):
    """A launcher that stands for real ranks: whenever it is the turn of plan 1, they break."""
    launches: list[list[str]] = []

    def break_at_plan_1(_num_ranks: int, arguments: list[str]) -> int:
        launches.append(arguments)
        path = Path(arguments[1])
        held = read_spec(Trials, path)
        for index, one in enumerate(held.trials):
            if one.failure is not None:
                continue
            held = held.model_copy(update={"running": index})
            write_spec(held, path)
            if index == 1:
                return 1
            done = {"step_s": (1.0 + index,), "peak_bytes": (5, 6)}
            held = held.with_trial(index, one.model_copy(update=done))
        write_spec(held, path)
        return 0

    monkeypatch.setattr(launch, "launch_local", break_at_plan_1)
    found = cli.run_trials_here(plans, rounds=1, steps=1)
    assert [one.failure for one in found.trials] == [None, "broke its ranks", None, None]
    assert [one.step_s for one in found.trials] == [(1.0,), (), (3.0,), (4.0,)]
    assert len(launches) == 3, "times, times again without the broken one, and peaks"
    assert winner(found) == found.trials[0]
    assert trials_table(found).row_count == 4


def test_ranks_that_break_outside_of_a_turn_end_the_trials(
    plans: tuple[meshwright.Plan, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "launch_local", lambda _ranks, _arguments: 1)
    with pytest.raises(typer.Exit) as ended:
        cli.run_trials_here(plans, rounds=1, steps=1)
    assert ended.value.exit_code == 1


def test_nothing_wins_when_nothing_ran(plans: tuple[meshwright.Plan, ...]):
    broken = Trials(trials=tuple(Trial(plan=plan, failure="broke its ranks") for plan in plans))
    assert winner(broken) is None
    slow, fast = (Trial(plan=plans[i], step_s=(seconds,)) for i, seconds in ((0, 2.0), (1, 1.0)))
    assert winner(Trials(trials=(slow, fast))) == fast
