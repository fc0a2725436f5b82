"""Versions as manifest and payloads: what comes out is what went in, bit for bit, in full or as a delta."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import DEADLINE_S
from weights_process import check_whole, fail, tree_of

from seedx.security import Access
from seedx.transport import delta, manifest
from seedx.transport import transport_pb2 as pb
from seedx.transport.assembly import Assembly, Held
from seedx.transport.buffers import Buffers
from seedx.transport.encode import CHUNK_BYTES, chunks, encode
from seedx.transport.errors import CorruptedError, TreeMismatchError
from seedx.transport.manifest import Manifest, VersionId, check_tensors
from seedx.transport.open import open_publisher, open_reader
from seedx.transport.tree import DTYPES, flatten, unflatten

WRITER = b"w" * 16


def version_of(tree, number=1, base=None, checksums=True, writer=WRITER):
    arrays = [(path, np.asarray(leaf, order="C")) for path, leaf in flatten(tree)]
    return encode(VersionId(writer, number), arrays, base, checksums)


def assemble(encoded, held=None, change=lambda stream: stream):
    """What a reader makes of a version that travelled in chunks."""
    assembly = Assembly(Manifest.from_bytes(encoded.manifest.to_bytes()), held, Buffers())
    for chunk in change(list(chunks(encoded))):
        assembly.feed(chunk)
    return assembly.finish()


@st.composite
def two_versions(draw):
    """Two arrays of any dtype and shape whose bits are anything, and equal in many places."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
    bits = np.dtype(f"u{dtype.itemsize}")
    old, flips = draw(hnp.arrays(bits, shape)), draw(hnp.arrays(bits, shape, fill=st.just(bits.type(0))))
    return old.view(dtype), np.asarray(old ^ flips).view(dtype)


@given(two_versions(), st.booleans())
def test_a_delta_gives_the_very_bits(pair, checksums):
    old, new = pair
    first = version_of({"x": old}, 1, checksums=checksums)
    second = version_of({"x": new}, 2, first, checksums=checksums)
    held = assemble(first.full)
    assert_bit_equal(held.weights().params, {"x": old})
    assert_bit_equal(assemble(second.full).weights().params, {"x": new})
    if second.delta is not None:
        assert second.delta.manifest.payload_bytes < second.full.manifest.payload_bytes
        assert_bit_equal(assemble(second.delta, held).weights().params, {"x": new})
        assert_bit_equal(held.weights().params, {"x": old})


SPECIAL = np.array([0x7FC1, 0xFFC0, 0x7F81, 0x8000, 0x0000, 0x7F80, 0x0001], np.uint16).view(jnp.bfloat16)


def test_nans_and_zeros_count_by_their_bits():
    base = np.resize(SPECIAL, 1000)
    for i, bits in ((0, 0x7FC2), (3, 0x0000), (4, 0x8000)):  # another NaN, and zeros of the other sign
        new = base.copy()
        new.view(np.uint16)[i] = bits
        first = version_of({"x": base})
        second = version_of({"x": new}, 2, first)
        assert second.delta.manifest.tensors[0].encoding == pb.Tensor.SPARSE
        assert second.delta.manifest.payload_bytes == 6
        assert_bit_equal(assemble(second.delta, assemble(first.full)).weights().params, {"x": new})


def test_each_tensor_has_the_smallest_encoding():
    rng = np.random.default_rng(0)
    same, few, small, other = (rng.normal(size=50_000).astype(jnp.bfloat16) for _ in range(4))
    first = version_of({"same": same, "few": few, "small": small, "other": other})
    few, small = few.copy(), small.copy()
    few[[7, 40_000]] = 1
    small.view(np.uint16)[:] ^= rng.integers(0, 2, 50_000, dtype=np.uint16)  # half of the lowest bits
    other = rng.integers(0, 2**16, 50_000, dtype=np.uint16).view(jnp.bfloat16)
    tree = {"same": same, "few": few, "small": small, "other": other}
    second = version_of(tree, 2, first)
    found = {tensor.path[0]: tensor for tensor in second.delta.manifest.tensors}
    kinds = {"same": pb.Tensor.UNCHANGED, "few": pb.Tensor.SPARSE, "small": pb.Tensor.XOR, "other": pb.Tensor.FULL}
    assert {name: tensor.encoding for name, tensor in found.items()} == kinds
    assert (found["same"].payload_bytes, found["few"].payload_bytes, found["other"].payload_bytes) == (0, 12, 100_000)
    assert found["small"].payload_bytes < 15_000
    held = assemble(first.full)
    assert_bit_equal(assemble(second.delta, held).weights().params, tree)
    assert assemble(second.delta, held).arrays["same",] is held.arrays["same",]


def test_blocks_of_a_large_tensor():
    base = np.random.default_rng(1).integers(0, 256, 2 * delta._BLOCK + 5, dtype=np.uint16)
    new = base.copy()
    new[[0, delta._BLOCK, -1]] += 1
    for encoding, payload in (
        delta.encode(base, new),
        (pb.Tensor.XOR, delta._xor(base, new, new.nbytes)),
    ):
        array = base.copy()
        delta.apply(encoding, np.frombuffer(payload, np.uint8), array)
        assert_bit_equal(array, new)


def test_no_delta_where_it_does_not_help_or_the_tree_is_another():
    rng = np.random.default_rng(2)
    first = version_of({"x": rng.integers(0, 256, 1000, dtype=np.uint8)})
    assert version_of({"x": rng.integers(0, 256, 1000, dtype=np.uint8)}, 2, first).delta is None
    for tree in ({"y": np.zeros(1000, np.uint8)}, {"x": np.zeros(1000, np.int8)}, {"x": np.zeros((10, 100), np.uint8)}):
        assert version_of(tree, 2, first).delta is None


TREE = {
    "layers": {"0": {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)}, "1": {"w": np.zeros((0, 4), np.int8)}},
    "scale": np.float32(3) * np.ones(()),
}


def test_trees():
    assert [path for path, _ in flatten(TREE)] == [("layers", "0", "w"), ("layers", "1", "w"), ("scale",)]
    assert_bit_equal(unflatten(flatten(TREE)), TREE)
    assert_bit_equal(unflatten(flatten(np.ones(2))), np.ones(2))
    for tree, message in (
        ({"a": {}}, r"a has the keys \[\]"),
        ({"a": {1: np.ones(2)}}, r"a has the keys \[1\]"),
        ({"a": [np.ones(2)]}, "a is a list; weights are nested dicts of arrays"),
        ({"a": {"b": np.ones(2, np.complex64)}}, "a/b has dtype complex64"),
        ({"a": np.ones(2, ">f4")}, "a has dtype >f4"),
        ({"a": jax.random.key(0)}, "a has dtype key<fry>"),
    ):
        with pytest.raises(ValueError, match=message):
            flatten(tree)


def test_arrays_that_arrive_cannot_be_written_to():
    params = assemble(version_of(TREE).full).weights().params
    with pytest.raises(ValueError, match="read-only"):
        params["scale"][...] = 0


def test_payloads_travel_in_chunks():
    large = np.random.default_rng(3).integers(0, 256, 3 * CHUNK_BYTES + 7, dtype=np.uint8)
    tree = {"a": np.ones(3), "b": large, "c": np.ones(2, np.int8)}
    encoded = version_of(tree).full
    assert [len(chunk) for chunk in chunks(encoded)] == [CHUNK_BYTES] * 3 + [7 + 24 + 2 + 3 * 8]
    assert_bit_equal(assemble(encoded).weights().params, tree)
    byte_by_byte = assemble(version_of(TREE).full, change=lambda stream: [bytes([b]) for b in b"".join(stream)])
    assert_bit_equal(byte_by_byte.weights().params, TREE)


@given(st.integers(0, 4000), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(at, flip):
    rng = np.random.default_rng(4)
    base = {"a": rng.normal(size=500), "b": rng.normal(size=2000).astype(jnp.bfloat16)}
    new = {
        "a": base["a"].copy(),
        "b": (base["b"].view(np.uint16) ^ rng.integers(0, 2, 2000, np.uint16)).view("bfloat16"),
    }
    new["a"][:7] = 0
    first = version_of(base)
    second = version_of(new, 2, first)

    def change(stream):
        data = bytearray(b"".join(stream))
        data[at % len(data)] ^= flip
        return [bytes(data)]

    for encoded, held in ((second.full, None), (second.delta, assemble(first.full))):
        try:
            got = assemble(encoded, held, change)
        except CorruptedError:
            continue
        assert encoded is second.delta  # some bits of a compressed stream mean nothing
        assert_bit_equal(got.weights().params, new)


def test_bytes_too_few_or_too_many():
    encoded = version_of(TREE).full
    with pytest.raises(CorruptedError, match="ends within tensor scale"):
        assemble(encoded, change=lambda stream: [b"".join(stream)[:-1]])
    with pytest.raises(CorruptedError, match="version 1 has 1 bytes too many"):
        assemble(encoded, change=lambda stream: [*stream, b"x"])


def test_a_delta_fits_its_base_alone():
    first = version_of(TREE)
    second = version_of(TREE, 2, first)
    other = assemble(version_of({"x": np.ones(2)}).full)
    for held, message in (
        (None, "version 2 is a delta to version 1, and this reader has nothing"),
        (assemble(version_of(TREE, 3).full), "a delta to version 1, and this reader has version 3"),
        (assemble(version_of(TREE, writer=b"v" * 16).full), "this reader has version 1 of another publisher"),
        (Held(first.id, other.arrays), "tensor layers/0/w is not as in version 1, its base"),
    ):
        with pytest.raises(CorruptedError, match=message):
            assemble(second.delta, held)


def test_a_base_with_other_bits_is_noticed():
    base = np.zeros(100, np.float32)
    first, changed = version_of({"x": base}), base.copy()
    changed[3] = 1
    second = version_of({"x": changed}, 2, first)
    forged = Held(first.id, {("x",): np.ones(100, np.float32)})
    with pytest.raises(CorruptedError, match="tensor x of version 2 has checksum"):
        assemble(second.delta, forged)


def test_damaged_deltas_are_refused():
    base = np.zeros(10, np.float32)
    for encoding, payload, message in (
        (pb.Tensor.SPARSE, b"x" * 9, "of 9 bytes does not fit 10"),
        (pb.Tensor.SPARSE, np.array([10, 0], np.uint32).tobytes(), "does not fit 10 elements"),
        (pb.Tensor.XOR, b"nonsense", "cannot be read"),
        (pb.Tensor.XOR, delta._xor(np.zeros(11, np.uint32), np.ones(11, np.uint32), 99), "not the 40 bytes"),
    ):
        with pytest.raises(CorruptedError, match=message):
            delta.apply(encoding, np.frombuffer(payload, np.uint8), base)


def forged(**changes):
    given = pb.Manifest.FromString(version_of({"x": np.ones(3, np.float32)}).full.manifest.to_bytes())
    for name, value in changes.items():
        setattr(given if hasattr(given, name) else given.tensors[0], name, value)
    return given


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (b"\xff", "something else than a manifest"),
        (b"", "protocol 0"),
        (forged(protocol=9), "protocol 9"),
        (forged(writer=b"short"), "writer of 5 bytes"),
        (forged(version=-1), "version -1"),
        (forged(dtype="object"), "tensor x cannot have dtype 'object'"),
        (forged(payload_bytes=13), "tensor x has payload_bytes 13; its size is 12"),
        (forged(encoding=pb.Tensor.SPARSE), "tensor x has encoding 2, and the version base None"),
        (forged(encoding=9, base=0), "tensor x has encoding 9, and the version base 0"),
    ],
)
def test_malformed_manifests_are_refused(message, fault):
    with pytest.raises(CorruptedError, match=fault):
        Manifest.from_bytes(message if isinstance(message, bytes) else message.SerializeToString())


def test_manifests_with_impossible_tensors():
    given = forged()
    given.tensors[0].shape[:] = [-3]
    with pytest.raises(CorruptedError, match=r"tensor x cannot have dtype 'float32' and shape \[-3\]"):
        Manifest.from_bytes(given.SerializeToString())
    given = forged()
    given.tensors.append(given.tensors[0])
    with pytest.raises(CorruptedError, match="names a tensor twice"):
        Manifest.from_bytes(given.SerializeToString())


def test_other_tensors_are_named():
    found = version_of(TREE).full.manifest
    check_tensors(TREE, found)
    check_tensors(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), TREE), found)
    wanted = {"layers": {"0": {"w": np.ones((2, 3), np.float32)}}, "head": np.ones(4, np.int8)}
    with pytest.raises(TreeMismatchError) as caught:
        check_tensors(wanted, found)
    for part in (
        "head is absent, not int8[4]",
        "layers/0/w is bfloat16[2, 3], not float32[2, 3]",
        "layers/1/w is int8[0, 4], not expected",
        "scale is float64[], not expected",
    ):
        assert part in str(caught.value)
    assert len(WRITER) == manifest.WRITER_BYTES


def test_memory_is_used_again_once_nobody_sees_it():
    buffers = Buffers()
    first, second = buffers.take(100), buffers.take(100)
    places = {first.ctypes.data, second.ctypes.data}
    view = first.view(np.float32).reshape(5, 5)[1:]
    shared = memoryview(second)
    del first, second
    assert buffers.take(100).ctypes.data not in places
    del view
    third = buffers.take(100)
    assert third.ctypes.data in places
    del shared
    assert {third.ctypes.data, buffers.take(100).ctypes.data} == places
    buffers.trim()
    assert buffers.take(0).size == 0


@pytest.mark.parametrize("kind", ["dir", "shm", "unix"])
def test_a_reader_hears_the_next_publisher_whose_numbers_may_be_lower(tmp_path, opened, kind):
    address = f"shm:{tmp_path.parent.name}-{tmp_path.name}" if kind == "shm" else f"{kind}:{tmp_path}/weights"
    reader = open_reader(address, Access())
    opened.append(reader)
    heard = -1
    for versions in ((5, 6), (2, 3), (3,), (9,)):
        publisher = open_publisher(address, Access(), fail)
        for version in versions:
            publisher.publish(version, tree_of(version, 4000))
            weights = reader.receive(heard, DEADLINE_S)
            assert weights.version == version
            check_whole(weights, 4000)
            heard = version
        assert reader.receive(heard, 0.0) is None
        publisher.close()
