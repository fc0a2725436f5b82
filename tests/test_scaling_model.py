"""The cost model: how its rates follow from its unit costs, and that docs/scaling.md says what it says."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from cost_model import Machine, Shape, UnitCosts, full_lag, lag, predict  # noqa: E402

MS = 1e-3
COSTS = UnitCosts(
    env=2 * MS, client=1 * MS, front_end=0.5 * MS, act=0.5 * MS, act_pool=2 * MS, learn=8 * MS, learn_pool=24 * MS
)
SHAPE = Shape(actors=8, groups=2, rows=10, batch_size=4, unroll_length=20, queue=8)


def test_the_least_bound_is_the_rate():
    rates = predict(COSTS, SHAPE, Machine(cores=2))
    # A step: 0.3 ms of an actor, 0.1 + 0.1 ms of the learner's Python, 0.2 + 0.3 ms of XLA's threads.
    assert rates.bounds == pytest.approx({"cores": 2000.0, "learner process": 5000.0, "actors": 8 / 0.3e-3})
    assert rates.bound == "cores"
    assert (rates.steps, rates.messages, rates.updates) == pytest.approx((2000.0, 200.0, 25.0))


def test_twice_the_cores_are_twice_the_rate_until_one_interpreter_bounds_it():
    one, two, many = (predict(COSTS, SHAPE, Machine(cores)) for cores in (2, 4, 400))
    assert two.steps == pytest.approx(2 * one.steps)
    assert many.bound == "learner process"
    assert predict(COSTS, SHAPE, Machine(800)).steps == many.steps


def test_a_slow_update_bounds_the_chips_and_more_chips_help():
    slow = Machine(400, chips=4, act_s=1 * MS, update_s=3 * MS, transfer_s=0.01 * MS)
    assert predict(COSTS, SHAPE, slow).bound == "chips"
    assert predict(COSTS, SHAPE, slow).steps == pytest.approx(1000.0)
    assert predict(COSTS, SHAPE, dataclasses.replace(slow, chips=8)).steps == pytest.approx(2000.0)


def test_few_actors_bound_the_rate_by_what_each_can_step():
    few = dataclasses.replace(SHAPE, actors=1)
    assert predict(COSTS, few, Machine(400)).bound == "actors"
    assert predict(COSTS, few, Machine(400)).steps == pytest.approx(1 / 0.3e-3)


def test_python_takes_longer_in_a_run_and_computing_does_not():
    assert predict(COSTS, SHAPE, Machine(2, busy=1.25)).steps == pytest.approx(
        2 / (0.2e-3 + 1.25 * (0.1e-3 + 0.2e-3) + 0.5e-3)
    )


def test_lag_grows_with_the_slots_and_shrinks_with_the_batch():
    long = Shape(actors=1, groups=2, rows=64, batch_size=64, unroll_length=10**6, queue=128)
    # Two batches' worth of slots: half an unroll is one update.
    assert lag(long, learning=0.5) == pytest.approx(1.0 + 0.5, abs=1e-5)
    assert lag(dataclasses.replace(long, actors=2), 0.5) == pytest.approx(2.0 + 0.5, abs=1e-5)
    assert lag(dataclasses.replace(long, batch_size=128), 0.5) == pytest.approx(0.5 + 0.25 + 0.5, abs=1e-5)
    assert full_lag(long, 0.5) == pytest.approx(lag(long, 0.5) + 2 + 2)


def rows_of(table: str) -> list[dict[str, str]]:
    """The rows of a table in docs/scaling.md, which an HTML comment names."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    header, _, *lines = re.search(rf"<!-- {table} -->\n\n((?:\|.*\n)+)", text)[1].splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")]
    return [dict(zip(names, [cell.strip() for cell in line.strip("|").split("|")], strict=True)) for line in lines]


def test_the_documented_predictions_follow_from_the_documented_unit_costs():
    fitted = float(re.search(r"`busy` is ([\d.]+)", (ROOT / "docs" / "scaling.md").read_text())[1])
    runs = rows_of("runs")
    assert len(runs) >= 3
    for run in runs:
        costs = UnitCosts(
            *[float(run[field.name]) / 1e6 for field in dataclasses.fields(UnitCosts)]  # in microseconds
        )
        shape = Shape(*[int(number) for number in run["shape"].split("/")])
        rates = predict(costs, shape, Machine(2, fitted))
        predicted, measured = (float(run[name].replace(",", "")) for name in ("predicted", "measured"))
        assert rates.steps == pytest.approx(predicted, rel=0.02)
        assert rates.bound == run["bound"]
        assert 0.8 <= predicted / measured <= 1.2
