"""A table's signature and items that it admits or does not."""

import numpy as np
import pytest
from reverb_harness import S, insert, numbered, numbers_of, reverb_server

from seedx.replay import reverb_pb2 as pb
from seedx.replay.items import Ragged
from seedx.replay.reverb_layout import layout_of
from seedx.replay.reverb_replay import ReverbReplay
from seedx.replay.reverb_signature import check_signature

FRAME = "tf.TensorSpec([3, None], tf.int64)"
STATE = "tf.TensorSpec([], tf.float32)"
ADMITS = [
    f"({FRAME}, {STATE})",
    f"[{FRAME}, [{STATE}]]",
    f"dict(frame={FRAME}, state={STATE})",
    "(tf.TensorSpec(None, tf.int64), tf.TensorSpec([], tf.float32))",
    "__import__('collections').namedtuple('Item', 'frame state')"
    "(tf.TensorSpec([None, 4], tf.int64), tf.TensorSpec([], tf.float32, name='n'))",
]
REFUSES = {
    f"({FRAME}, {STATE}, {STATE})": "2 columns instead of 3",
    f"(tf.TensorSpec([3, 5], tf.int64), {STATE})": r"\['frame'\] int64\[3, 4\] instead of int64\[3, 5\]",
    f"(tf.TensorSpec([4], tf.int64), {STATE})": r"int64\[3, 4\] instead of int64\[4\]",
    f"(tf.TensorSpec([3, None], tf.int32), {STATE})": r"int64\[3, 4\] instead of int32\[3, \?\]",
    f"dict(observation={FRAME}, state={STATE})": r"\['frame'\] int64\[3, 4\] instead of observation int64\[3, \?\]",
    f"({FRAME}, tf.TensorSpec([1], tf.string))": r"\.state float32\[\] instead of dtype 7\[1\]",
}


@pytest.mark.external
def test_items_that_a_signature_admits_are_taken():
    tables = [{"name": f"t{i}", "max_size": 9, "signature": signature} for i, signature in enumerate(ADMITS)]
    with reverb_server(*tables) as address:
        for table in tables:
            replay = ReverbReplay(f"reverb://{address}", table["name"], example=numbered(1))
            insert(replay, 1, 2)
            assert numbers_of(replay.sample(2, S)) == [1, 2]
            replay.close()


@pytest.mark.external
def test_items_that_a_signature_does_not_admit_are_refused_at_the_start_with_what_differs():
    tables = [{"name": f"t{i}", "max_size": 9, "signature": signature} for i, signature in enumerate(REFUSES)]
    with reverb_server(*tables) as address:
        for table, words in zip(tables, REFUSES.values(), strict=True):
            with pytest.raises(ValueError, match=f"table '{table['name']}' at {address} admits other .*{words}"):
                ReverbReplay(f"reverb://{address}", table["name"], example=numbered(1))
            replay = ReverbReplay(f"reverb://{address}", table["name"])
            with pytest.raises(ValueError, match=words):
                insert(replay, 1)
            assert replay.info()["replay/inserted"] == 0
            replay.close()


def test_signatures_of_kinds_that_are_not_known_are_passed_over():
    unknown = pb.StructuredValue.FromString(b"\x92\x02\x00")  # field 34, a type_spec_value
    for value in (unknown, pb.StructuredValue(list_value=pb.ListValue(values=[unknown]))):
        check_signature(pb.TableInfo(name="replay", signature=value), layout_of(numbered(1)), "here:1")
    nothing = pb.TableInfo(name="replay", signature=pb.StructuredValue(none_value=pb.NoneValue()))
    with pytest.raises(ValueError, match="2 columns instead of 0"):
        check_signature(nothing, layout_of(numbered(1)), "here:1")


def test_sizes_that_vary_match_any():
    spec = pb.TensorSpec(dtype=9, shape=pb.TensorShape(dim=[pb.TensorShape.Dim(size=7)]))
    table = pb.TableInfo(name="replay", signature=pb.StructuredValue(tensor_spec_value=spec))
    check_signature(table, layout_of(Ragged(np.arange(5), np.array([2, 3]), None)), "here:1")
    with pytest.raises(ValueError, match="here:1"):
        check_signature(table, layout_of(Ragged(np.arange(5.0), np.array([2, 3]), None)), "here:1")
