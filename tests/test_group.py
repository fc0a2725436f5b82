"""Groups as items: what a replay gets of them."""

import numpy as np
import pytest
from text_fakes import Completion, items_of, sample_of

from seedx.envs.text.group import Group, example_item, to_item
from seedx.replay.items import check_kind, choose, kind_of, number_of

GROUPS = (
    ([5, 6], [Completion([7, 8, 9], 1.0, (1,), version=3), Completion([4], np.nan, finish_reason="length")]),
    ([1], [Completion([2, 3], 0.5), Completion([3, 2, 1, 0], -1.0, version=4)]),
)


def test_an_item_holds_a_group():
    item = items_of(GROUPS[0])
    assert number_of(item) == 1
    np.testing.assert_array_equal(item.lengths, [6])
    np.testing.assert_array_equal(item.rows["token"], [5, 6, 7, 8, 9, 4])
    np.testing.assert_array_equal(item.rows["sampled"], [False, False, True, False, True, True])
    np.testing.assert_array_equal(item.rows["logprob"], [0, 0, -1 / 8, 0, -3 / 8, -1 / 8])
    np.testing.assert_array_equal(item.rows["version"], [0, 0, 3, 0, 3, 0])
    np.testing.assert_array_equal(item.state["position"], [0])
    np.testing.assert_array_equal(item.state["lengths"], [[2, 3, 1]])
    np.testing.assert_array_equal(item.state["reward"], [[1.0, np.nan]])
    np.testing.assert_array_equal(item.state["truncated"], [[False, True]])


@pytest.mark.parametrize("empty", [False, True])
def test_all_items_of_a_run_are_of_one_kind(empty):
    tokens = [] if empty else [1, 2]
    samples = [sample_of(Completion(tokens, np.nan)) for _ in range(3)]
    item = to_item(Group(2**40, np.array([7], np.int32), samples))
    check_kind(item, kind_of(example_item(3)), 1)
    assert item.state["position"] == 2**40
    with pytest.raises(ValueError, match=r"lengths.*is int32\[1, 4\], but must be int32\[1, 5\]"):
        check_kind(item, kind_of(example_item(4)), 1)


def test_groups_of_different_lengths_are_joined_and_told_apart():
    items = items_of(*GROUPS)
    assert number_of(items) == 2
    np.testing.assert_array_equal(items.lengths, [6, 7])
    second = choose(items, np.array([1]))
    np.testing.assert_array_equal(second.rows["token"], [1, 2, 3, 3, 2, 1, 0])
    np.testing.assert_array_equal(second.state["lengths"], [[1, 2, 4]])
