"""Counting, choosing and joining items: of ragged ones each keeps its own rows."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.replay.fifo import Fifo
from seedx.replay.items import Ragged, choose, join, number_of, rows_of


def ragged(*lengths):
    """Items whose rows carry the item's number and their own."""
    lengths = np.array(lengths, np.int64)
    numbers = np.arange(len(lengths))
    rows = {"item": np.repeat(numbers, lengths), "row": np.concatenate([np.arange(n) for n in lengths])}
    return Ragged(rows, lengths, {"reward": numbers.astype(np.float32)})


def apart(items):
    """Each item on its own, as nested lists."""
    ends = np.cumsum(items.lengths)
    return [
        (items.rows["item"][end - n : end].tolist(), items.rows["row"][end - n : end].tolist(), float(reward))
        for end, n, reward in zip(ends, items.lengths, items.state["reward"], strict=True)
    ]


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_chosen_items_keep_their_rows(data, lengths):
    items, count = ragged(*lengths), len(lengths)
    one_by_one = apart(items)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    numbers = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=9)), np.int64)
    some = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    assert apart(choose(items, slice(start, stop))) == one_by_one[start:stop]
    assert apart(choose(items, numbers)) == [one_by_one[n] for n in numbers]
    assert apart(choose(items, some)) == [item for item, taken in zip(one_by_one, some, strict=True) if taken]
    assert apart(join([choose(items, slice(start)), choose(items, slice(start, None))])) == one_by_one
    assert number_of(items) == count


def test_rows_of_items():
    assert rows_of(np.array([10, 0, 5]), np.array([2, 3, 1])).tolist() == [10, 11, 0, 1, 2, 5]


@pytest.mark.parametrize(
    ("lengths", "match"),
    [([2, 0], "from 1"), ([[2], [2]], "vector"), ([1.0, 3.0], "whole"), ([2, 3], "with 5"), ([4], "begin with 1")],
)
def test_ragged_items_that_do_not_agree_are_refused(lengths, match):
    wrong = ragged(1, 3)._replace(lengths=np.array(lengths))
    with pytest.raises(ValueError, match=match):
        number_of(wrong)


def test_ragged_items_leave_a_queue_in_order():
    fifo, items = Fifo(100), ragged(1, 4, 2, 3, 1)
    for part in (slice(0, 3), slice(3, 5)):
        fifo.insert(choose(items, part), np.ones(part.stop - part.start), 0.0)
    fifo.delete(fifo.sample(1, 0.0).keys)  # passed over
    taken = fifo.sample(3, 0.0)
    assert apart(taken.items) == apart(items)[1:4]
    fifo.delete(np.array([4], np.uint64))
    assert fifo.info()["replay/items"] == 0
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(taken))
