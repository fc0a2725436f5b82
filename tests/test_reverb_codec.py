import contextlib
from collections import OrderedDict

import cramjam
import jax
import ml_dtypes
import numpy as np
import pytest
from bits import assert_bit_equal
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from seedx.config import TableConfig
from seedx.replay import reverb_pb2 as pb
from seedx.replay.description import table_description
from seedx.replay.items import Ragged, number_of
from seedx.replay.reverb_codec import ReverbDataError, compress, count_rows, make_chunk, read_item
from seedx.replay.reverb_decoder import Received, complete_samples
from seedx.replay.reverb_decoder import decode as decode_samples
from seedx.replay.reverb_encoder import Encoder
from seedx.replay.reverb_layout import Column, Layout, Leaves, check_layout, layout_of, split
from seedx.replay.reverb_writer import remember
from seedx.types import TimeStep, Unroll

DTYPES = [
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool", "bfloat16"),
]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def random_array(rng, name, *shape):
    """Any bits that the dtype can have."""
    dtype = dtype_of(name)
    raw = rng.integers(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def make_unrolls(rng, n, rows, names=("uint8", "float32")):
    def leaf(name, *shape):
        return np.moveaxis(random_array(rng, name, rows, n, *shape), 1, 0)  # time-major in memory, as the store's

    timestep = TimeStep(leaf("uint8"), leaf("float32"), leaf("float32"), {name: leaf(name, 3, 2) for name in names})
    state = (random_array(rng, "float32", n, 5), random_array(rng, "int32", n))
    return Unroll(timestep, leaf("int32"), {}, leaf("int32"), state)


def parse(item):
    """The message of an item, and its chunks by key."""
    request = pb.InsertStreamRequest.FromString(
        b"".join([*(piece for c in item.chunks for piece in c.pieces), item.request])
    )
    return request.items[0], {chunk.chunk_key: chunk for chunk in request.chunks}


def decode(items, layout):
    """What was put into items."""
    return decode_samples(
        [Received(pb.SampleInfo(item=message), chunks) for message, chunks in map(parse, items)], layout, "t"
    )


def encode(items, encoder, sources=None):
    layout = layout_of(items)
    parts = list(split(items, layout))
    sources = [None] * len(parts) if sources is None else sources
    keys = encoder.keys(len(parts))
    return [encoder.encode(layout, *each, 1.0, s) for *each, s in zip(parts, keys, sources, strict=True)], layout


def test_messages_have_reverbs_numbers():
    # Written by hand after schema.proto, reverb_service.proto and tensorflow/core/framework/tensor.proto.
    tensor = b"\x08\x04" + b"\x12\x04\x12\x02\x08\x02" + b"\x22\x04\x02\x04\x07\x08"
    chunk = b"\x08\x05\x12\x06\x08\x09\x10\x03\x18\x04\x2a\x10\x0a\x0e" + tensor + b"\x30\x01\x38\x02"
    flat = b"\x0a\x0a\x0a\x06\x08\x05\x10\x01\x18\x01\x10\x01"
    item = b"\x08\x07\x12\x01r\x29" + np.float64(2.5).tobytes() + b"\x42\x0c" + flat
    golden = b"\x0a" + bytes([len(chunk)]) + chunk + b"\x12" + bytes([len(item)]) + item + b"\x1a\x02\x05\x06"
    request = pb.InsertStreamRequest(keep_chunk_keys=[5, 6])
    request.MergeFromString(b"".join(make_chunk(5, 9, 3, [np.array([7, 8], np.uint8)]).pieces))
    message = request.items.add(key=7, table="r", priority=2.5)
    column = message.flat_trajectory.columns.add(squeeze=True)
    column.chunk_slices.add(chunk_key=5, offset=1, length=1)
    assert request.SerializeToString(deterministic=True).hex() == golden.hex()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(name):
    unrolls = make_unrolls(np.random.default_rng(3), 3, 4, (name,))
    items, layout = encode(unrolls, Encoder("t", 0, 8))
    assert_bit_equal(decode(items, layout), unrolls)


def test_bytes_are_little_endian_in_c_order():
    array = np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3))
    assert bytes(cramjam.snappy.decompress_raw(compress(array))) == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0])


def test_trees_that_are_no_unrolls_have_columns_of_one_row():
    tree = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(2), "none": None}
    items, layout = encode(tree, Encoder("t", 0, 8))
    assert [(c.name, c.squeeze, c.shape) for c in layout.columns] == [("['a']", True, ()), ("['b']", True, (3,))]
    assert_bit_equal(decode(items, layout), tree)


@given(rows=st.integers(2, 12), data=st.data())
def test_overlapping_rows_are_sent_once(rows, data):
    overlap = data.draw(st.integers(0, rows - 1))
    period, count = rows - overlap, data.draw(st.integers(1, 5))
    rng = np.random.default_rng(rows)
    frames = rng.integers(0, 256, ((count - 1) * period + rows, 2), dtype=np.uint8)
    encoder, sent = Encoder("t", overlap, 8), {}
    for i in range(count):
        own = frames[i * period : i * period + rows]
        other = rng.integers(0, 256, own.shape, dtype=np.uint8)  # a source without a past comes in between
        unrolls = Unroll({"x": np.stack([own, other])}, None, None, None, np.full((2, 1), i))
        items, layout = encode(unrolls, encoder, [1, 100 + i])
        assert_bit_equal(decode(items, layout), unrolls)
        sent |= {key: chunk.sequence_range for key, chunk in parse(items[0])[1].items()}
        rows_to_come = sum(chunk.rows for chunk in items[0].tail)
        assert rows_to_come == (overlap if overlap >= 2 else 0)
    rows_sent = sum(steps.end - steps.start + 1 for steps in sent.values()) - count  # a state chunk has one row
    assert rows_sent == (len(frames) if overlap >= 2 else count * rows)
    assert max(steps.end for steps in sent.values()) + 1 == (len(frames) if overlap >= 2 else rows)
    assert len({steps.episode_id for steps in sent.values()}) == (1 if overlap >= 2 else count)


def test_remembered_sources_are_bounded():
    tails = OrderedDict()
    for source in [*range(1024), 0, 5000, 5001]:
        remember(tails, source, f"tail {source}", 1024)
    assert len(tails) == 1024
    assert tails[0] == "tail 0"
    assert not {1, 2} & tails.keys()


@pytest.mark.parametrize(("max_sources", "sent"), [(2048, 3), (2047, 5)])
def test_sources_that_take_turns_share_their_rows_if_all_of_them_are_remembered(max_sources, sent):
    encoder, known = Encoder("t", 2, max_sources), set()
    for start in (0, 3):
        frames = np.arange(start, start + 5, dtype=np.uint8)[None].repeat(2048, 0)
        items, _ = encode(Unroll(frames, None, None, None, None), encoder, range(2048))
        rows = [sum(chunk.rows for chunk in item.chunks if chunk.key not in known) for item in items]
        assert set(rows) == {sent if start else 5}
        known = {chunk.key for item in items for chunk in item.tail}


# ---- reading what others wrote

LAYOUT = Layout(jax.tree.structure([0]), (Column("[0]", np.dtype(np.int16), (3, 2), squeeze=False),), 3)


RAGGED = Layout(
    jax.tree.structure(Leaves([0], None)),
    (Column(".rows[0]", np.dtype(np.int16), (None, 2), squeeze=False),),
    None,
)


def chunk_of(array, key=1, delta=False):
    request = pb.InsertStreamRequest.FromString(b"".join(make_chunk(key, 1, 0, [array]).pieces))
    request.chunks[0].delta_encoded = delta
    return request.chunks[0]


def trajectory(*slices, squeeze=False):
    pieces = [
        pb.FlatTrajectory.ChunkSlice(chunk_key=key, offset=offset, length=length, index=index)
        for key, offset, length, index in slices
    ]
    return pb.FlatTrajectory(columns=[pb.FlatTrajectory.Column(chunk_slices=pieces, squeeze=squeeze)])


def read(message, chunks, layout=LAYOUT):
    by_key = {chunk.chunk_key: chunk for chunk in chunks}
    count = count_rows(message, by_key, layout)
    out = [np.zeros((count + 1, *column.row_shape), column.dtype) for column in layout.columns]
    read_item(message, by_key, layout, [array[1:] for array in out])
    assert not out[0][0].any()
    return out[0][1:]


@given(st.data())
def test_slices_may_begin_anywhere_repeat_and_overlap(data):
    arrays = [np.random.default_rng(i).integers(-(2**15), 2**15, (4, 2), np.int16) for i in range(2)]
    slices, left = [], 3
    while left:
        length = data.draw(st.integers(1, left))
        slices.append((data.draw(st.integers(0, 1)), data.draw(st.integers(0, 4 - length)), length, 0))
        left -= length
    expected = np.concatenate([arrays[key][start : start + length] for key, start, length, _ in slices])
    np.testing.assert_array_equal(read(trajectory(*slices), [chunk_of(a, i) for i, a in enumerate(arrays)]), expected)


def test_differences_are_added_up():
    array = np.array([[1, -5], [2**15 - 1, 3], [-(2**15), 4]], np.int16)
    delta = array.copy()
    delta[1:] -= array[:-1]  # wraps around
    np.testing.assert_array_equal(read(trajectory((1, 0, 3, 0)), [chunk_of(delta, delta=True)]), array)


def test_floats_and_vectors_are_never_differences():
    for array in (np.array([[1.5], [2.5]], np.float32), np.array([4, 5], np.int32)):
        layout = Layout(LAYOUT.structure, (Column("x", array.dtype, array.shape, squeeze=False),), 2)
        np.testing.assert_array_equal(read(trajectory((1, 0, 2, 0)), [chunk_of(array, delta=True)], layout), array)


GOOD = np.arange(6, dtype=np.int16).reshape(3, 2)


def damaged(**fields):
    chunk = chunk_of(GOOD)
    for name, value in fields.items():
        setattr(chunk.data.tensors[0], name, value)
    return chunk


def flat(array):
    chunk = chunk_of(array)
    chunk.data.tensors[0].tensor_shape.Clear()
    return chunk


@pytest.mark.parametrize(
    ("message", "chunk", "words"),
    [
        (trajectory((1, 0, 3, 0)), chunk_of(GOOD.astype(np.float32)), "are float32\\[3, 2\\]"),
        (trajectory((1, 0, 3, 0)), chunk_of(GOOD.reshape(3, 2, 1)), "are int16\\[3, 2, 1\\]"),
        (trajectory((1, 0, 3, 0)), chunk_of(GOOD[:, :1]), "are int16\\[3, 1\\]"),
        (trajectory((1, 0, 3, 0)), damaged(dtype=7), "dtype number 7"),
        (trajectory((1, 0, 3, 0)), flat(GOOD), "are int16\\[\\]"),
        (trajectory((1, 0, 2, 0)), chunk_of(GOOD), "has \\[2\\] rows"),
        (trajectory((1, 1, 3, 0)), chunk_of(GOOD), "rows 1 to 4 of a chunk of 3 rows"),
        (trajectory((1, -1, 3, 0)), chunk_of(GOOD), "rows -1 to 2"),
        (trajectory((1, 0, 3, 0), (1, 2, 0, 0)), chunk_of(GOOD), "rows 2 to 2"),
        (trajectory((1, 0, 4, 0), (1, 0, -1, 0)), chunk_of(GOOD), "has rows 0 to 4 of a chunk of 3 rows"),
        (trajectory((2, 0, 3, 0)), chunk_of(GOOD), "tensor 0 of chunk 2 did not come"),
        (trajectory((1, 0, 3, 1)), chunk_of(GOOD), "tensor 1 of chunk 1 did not come"),
        (trajectory((1, 0, 3, -1)), chunk_of(GOOD), "tensor -1 of chunk 1 did not come"),
        (trajectory((1, 0, 3, 0), squeeze=True), chunk_of(GOOD), "one has a row axis"),
        (trajectory((1, 0, 3, 0)), damaged(tensor_content=b""), "0 compressed bytes"),
        (trajectory((1, 0, 3, 0)), damaged(tensor_content=compress(GOOD)[:-1]), "damaged"),
        (trajectory((1, 0, 3, 0)), damaged(tensor_content=compress(GOOD[:2])), "hold 8 bytes instead of 12"),
        (trajectory((1, 0, 3, 0)), damaged(tensor_content=b"\xff\xff\xff\xff\x0f"), "hold 4294967295 bytes"),
    ],
)
def test_what_is_wrong_is_named_with_its_column(message, chunk, words):
    with pytest.raises(ReverbDataError, match=f"column \\[0\\], expected as int16\\[3, 2\\]: .*{words}"):
        read(message, [chunk])


def test_a_chunk_cannot_make_us_reserve_more_than_it_can_hold():
    chunk = damaged(tensor_content=b"\x80\x80\x80\x80\x04")  # says 2**30 bytes
    chunk.data.tensors[0].tensor_shape.dim[0].size = 2**28
    with pytest.raises(ReverbDataError, match="5 compressed bytes hold 1073741824"):
        read(trajectory((1, 5, 3, 0)), [chunk])


def test_rows_of_no_bytes_are_no_way_around_that():
    layout = Layout(RAGGED.structure, (Column("x", np.dtype(np.int16), (None, 0), squeeze=False),), None)
    empty = np.zeros((3, 0), np.int16)
    assert read(trajectory((1, 1, 2, 0)), [chunk_of(empty)], layout).shape == (2, 0)
    chunk = chunk_of(empty)
    chunk.data.tensors[0].tensor_shape.dim[0].size = 2**62
    with pytest.raises(ReverbDataError, match="of a chunk of 4611686018427387904 rows"):
        read(trajectory((1, 1, 2, 0)), [chunk], layout)


def test_the_number_of_columns_must_agree():
    with pytest.raises(ReverbDataError, match=r"has 0 columns instead of 1: \[0\] int16\[3, 2\]"):
        read(pb.FlatTrajectory(), [])


@pytest.mark.parametrize("layout", [LAYOUT, RAGGED])
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_damage_does_worse_than_an_error(layout, place, flip):
    response = pb.SampleStreamResponse()
    entry = response.entries.add(end_of_sequence=True, data=[chunk_of(GOOD, 1), chunk_of(GOOD, 2, delta=True)])
    entry.info.item.flat_trajectory.CopyFrom(trajectory((1, 0, 1, 0), (2, 0, 2, 0)))
    raw = bytearray(response.SerializeToString())

    def rows_read():
        samples = list(complete_samples([pb.SampleStreamResponse.FromString(bytes(raw))]))
        items = decode_samples(samples, layout, "t")
        return number_of(items)

    assert rows_read() == 1
    raw[place % len(raw)] ^= flip
    with contextlib.suppress(ReverbDataError, DecodeError):  # and nothing else
        assert rows_read() <= 1
    cut = bytes(raw[: place % len(raw)])
    raw[:] = cut
    with contextlib.suppress(ReverbDataError, DecodeError):
        assert rows_read() == 0


def test_samples_are_put_together_from_entries_and_messages():
    def entry(key=None, chunks=(), end=False):
        result = pb.SampleEntry(data=[chunk_of(GOOD, chunk) for chunk in chunks], end_of_sequence=end)
        if key is not None:
            result.info.item.key = key
        return result

    messages = [
        pb.SampleStreamResponse(entries=[entry(1, [1], end=True), entry(2, [2])]),
        pb.SampleStreamResponse(entries=[entry(chunks=[3])]),
        pb.SampleStreamResponse(entries=[entry(end=True), entry(3, [4], end=True)]),
    ]
    samples = [(sample.info.item.key, sorted(sample.chunks)) for sample in complete_samples(messages)]
    assert samples == [(1, [1]), (2, [2, 3]), (3, [4])]
    with pytest.raises(ReverbDataError, match="without its item"):
        list(complete_samples([pb.SampleStreamResponse(entries=[entry(end=True)])]))


# ---- ragged items


def make_ragged(rng, lengths, names=("uint8", "bfloat16"), state=True):
    total = int(np.sum(lengths))
    rows = {name: random_array(rng, name, total, *shape) for name, shape in zip(names, [(3, 2), ()], strict=False)}
    other = {"x": random_array(rng, "float32", len(lengths), 5), "y": (random_array(rng, "int64", len(lengths)),)}
    return Ragged(rows, np.asarray(lengths, np.int64), other if state else None)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    names=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2, unique=True),
    state=st.booleans(),
    sources=st.booleans(),
)
def test_ragged_items_come_back_bit_by_bit(lengths, names, state, sources):
    items = make_ragged(np.random.default_rng(len(lengths)), lengths, names, state)
    encoder = Encoder("t", 5, 8)  # they share nothing all the same
    encoded, layout = encode(items, encoder, [3] * len(lengths) if sources else None)
    assert layout.rows is None
    assert_bit_equal(decode(encoded, layout), items)
    assert not any(item.tail for item in encoded)
    assert len({chunk.key for item in encoded for chunk in item.chunks}) == len(lengths) * (1 + state)


def test_ragged_items_without_rows_or_with_leaves_that_disagree_are_refused():
    good = make_ragged(np.random.default_rng(1), [2, 3])
    for wrong, words in [
        (good._replace(rows={}), "need a leaf in `rows`"),
        (good._replace(lengths=np.array([2, 2])), r"rows\['bfloat16'\] has shape \[5\], but must begin with 4"),
        (good._replace(lengths=np.array([5, 0])), "from 1"),
        (good._replace(rows={"x": np.array(list("abcde"))}), "<U1; Reverb takes"),
    ]:
        with pytest.raises(ValueError, match=words):
            layout_of(wrong)


def test_rows_may_vary_and_nothing_else():
    rng = np.random.default_rng(1)
    expected = layout_of(make_ragged(rng, [2, 3]))
    check_layout(layout_of(make_ragged(rng, [7])), expected)
    wider = make_ragged(rng, [2])
    wider.rows["uint8"] = wider.rows["uint8"][:, :, :1]
    for other, words in [
        (wider, r"\.rows\['uint8'\] of the new items is uint8\[rows, 3, 1\], .* uint8\[rows, 3, 2\]; .*Use another"),
        (make_ragged(rng, [2], ("int8", "bfloat16")), r"rows\['int8'\]"),
        (make_ragged(rng, [2], state=False), "new items are PyTreeDef"),
        (make_unrolls(rng, 2, 4), r"uint8\[4\], but the table's items have \.rows\['bfloat16'\], bfloat16\[rows\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_layout(layout_of(other), expected)


def test_ragged_columns_that_disagree_are_refused():
    columns = [Column(name, np.dtype(np.int16), (None, 2), squeeze=False) for name in ("a", "b")]
    layout = Layout(jax.tree.structure(Leaves([0, 0], None)), tuple(columns), None)
    message = trajectory((1, 0, 3, 0))
    message.columns.extend(trajectory((1, 0, 2, 0)).columns)
    with pytest.raises(ReverbDataError, match=r"equally many rows, not \{'a': 3, 'b': 2\}"):
        read(message, [chunk_of(GOOD)], layout)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (trajectory(*[(1, 0, 3, 0)] * 1000), "it has 3000 rows, and its chunks 3"),
        (trajectory(), "it has 0 rows, and its chunks 0"),
        (trajectory((1, 0, 2**31 - 1, 0)), "rows 0 to 2147483647 of a chunk of 3 rows"),
        (trajectory((1, 0, 2, 0), (2, 0, 2**28, 0)), "5 compressed bytes hold 1073741824 bytes"),
    ],
)
def test_a_ragged_item_has_no_more_rows_than_came_with_it(message, words):
    huge = damaged(tensor_content=b"\x80\x80\x80\x80\x04")  # says 2**30 bytes
    huge.chunk_key, huge.data.tensors[0].tensor_shape.dim[0].size = 2, 2**28
    with pytest.raises(ReverbDataError, match=f"column .rows\\[0\\], expected as int16\\[rows, 2\\]: .*{words}"):
        read(message, [chunk_of(GOOD), huge], RAGGED)


# ---- layouts and addresses


def test_items_of_another_kind_are_refused_by_name():
    rng = np.random.default_rng(1)
    expected = layout_of(make_unrolls(rng, 2, 4))
    check_layout(layout_of(make_unrolls(rng, 3, 4)), expected)
    for other, words in [
        (make_unrolls(rng, 2, 5), r"\.timestep\.step_type of the new items is uint8\[5\]"),
        (make_unrolls(rng, 2, 4, ("uint8", "float64")), "observation.*'float64'.* but the table's"),
        (make_unrolls(rng, 2, 4)._replace(state=()), "the new items are PyTreeDef"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_layout(layout_of(other), expected)


def test_leaves_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="number of items"):
        layout_of({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="in their rows"):
        layout_of(Unroll(np.zeros((2, 4)), np.zeros((2, 3)), None, None, None))
    with pytest.raises(ValueError, match="in their rows"):
        layout_of(Unroll(np.zeros((2,)), None, None, None, None))
    with pytest.raises(ValueError, match="<U1; Reverb takes float32"):
        layout_of({"a": np.array(["x"])})


def test_a_servers_table_is_complete():
    assert table_description(TableConfig(), 4, "q") == {
        "name": "q",
        "sampler": "fifo",
        "remover": "fifo",
        "priority_exponent": 0.6,
        "max_size": 8,
        "max_times_sampled": 1,
        "samples_per_insert": 1.0,
        "min_size": 1,
        "min_diff": 0.0,
        "max_diff": 8.0,
    }
