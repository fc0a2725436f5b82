"""The sum-tree: sums that never drift, draws in proportion, updates in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.replay.sum_tree import MAX_VALUE, SumTree, bytes_of

# Up to one, two and three levels below the root, full rows and not.
CAPACITIES = [1, 2, 15, 16, 17, 300, 4096 * 16, 4096 * 16 + 1, 4096 * 256 + 3]


def filled(values):
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), np.asarray(values, np.float64))
    return tree


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_draw_falls_on_the_leaf_whose_stretch_it_hits(capacity):
    values = np.random.default_rng(0).integers(0, 3, capacity).astype(np.float64)
    values[capacity // 2] = 5.0
    tree = filled(values)
    assert tree.total == values.sum()  # integers: no rounding
    ends = np.cumsum(values)
    points = np.random.default_rng(1).integers(0, int(tree.total), 2000) + 0.5
    np.testing.assert_array_equal(tree.find(points / tree.total), np.searchsorted(ends, points))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_ends_of_the_range_fall_on_leaves_that_are_not_zero(capacity):
    values = np.zeros(capacity)
    values[capacity // 3 : capacity // 3 + 3] = 0.1, *[0.7, 1e-9][: capacity - capacity // 3 - 1]
    tree = filled(values)
    found = tree.find(np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert (values[found] > 0).all()


@given(st.data())
def test_any_sequence_of_updates_leaves_the_sums_of_the_last_values(data):
    capacity = data.draw(st.integers(1, 600))
    tree, oracle = SumTree(capacity), np.zeros(capacity)
    value = st.sampled_from([0.0, 1e-300, 1e-9, 0.5, 1.0, 3.7, 1e9, MAX_VALUE])
    for _ in range(data.draw(st.integers(1, 8))):
        pairs = data.draw(st.lists(st.tuples(st.integers(0, capacity - 1), value), max_size=20))
        tree.set(np.array([i for i, _ in pairs], np.int64), np.array([v for _, v in pairs], np.float64))
        for i, v in pairs:  # one by one: the last of equal indices counts
            oracle[i] = v
        np.testing.assert_array_equal(tree.get(np.arange(capacity)), oracle)
        np.testing.assert_allclose(tree.total, oracle.sum(), rtol=1e-13)
        assert (tree.total == 0) == (oracle.sum() == 0)
        if tree.total:
            draws = np.array(data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20)))
            assert (oracle[tree.find(draws)] > 0).all()


def test_rounding_does_not_pile_up():
    """A tree that added differences to its sums would keep an error of about 1e-3 from the large value."""
    tree, rng = SumTree(10_000), np.random.default_rng(0)
    for _ in range(200):
        tree.set(rng.integers(0, 10_000, 64), rng.random(64) * 1e13)
    tree.set(np.arange(10_000), np.full(10_000, 1e-6))
    assert tree.total == pytest.approx(1e-2, rel=1e-12)
    tree.set(np.arange(10_000), np.zeros(10_000))
    assert tree.total == 0.0


def chi_square(counts, probabilities):
    """How many standard deviations the chi-square statistic lies above its mean, over cells with expected counts."""
    expected = counts.sum() * probabilities
    cells = expected > 0
    assert (counts[~cells] == 0).all()
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = np.count_nonzero(cells) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("capacity", [100, 3000])
def test_draws_follow_the_values(capacity):
    rng = np.random.default_rng(0)
    values = rng.random(capacity) ** 3 + 0.01
    values[rng.random(capacity) < 0.2] = 0.0
    tree = filled(values)
    counts = np.zeros(capacity)
    for _ in range(100):
        np.add.at(counts, tree.find(rng.random(10_000)), 1)
    assert abs(chi_square(counts, values / values.sum())) < 4


def test_the_chi_square_test_sees_wrong_draws():
    """One leaf in a hundred a tenth too often."""
    probabilities = np.full(100, 0.01)
    wrong = probabilities.copy()
    wrong[0] *= 1.1
    counts = np.random.default_rng(0).multinomial(1_000_000, wrong / wrong.sum())
    assert abs(chi_square(counts, probabilities)) > 4


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_memory_is_known_before_there_is_a_tree(capacity):
    tree = SumTree(capacity)
    assert bytes_of(capacity) == sum(array.nbytes for array in (*tree._levels, tree._root, tree._running))
