"""Messages: what is written is read back, in protobuf's own terms, and nothing but WireError comes of bad ones."""

import contextlib

import numpy as np
import optree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_strategies import build, raw_specs, timestep, values

from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.types import ArraySpec, EnvSpec, StepType

SPEC = EnvSpec(
    "env",
    {"image": ArraySpec((3, 3), "uint8"), "pair": (ArraySpec((2,), "float32"), ArraySpec((), "int32", 5))},
    {"move": ArraySpec((), "int32", 3), "aim": ArraySpec((2,), "float32")},
)
N = 4
CODEC = wire.TimestepCodec(SPEC, N)


def sound(seed=0, spec=SPEC, num_envs=N):
    return timestep(spec, num_envs, np.random.default_rng(seed))


def encoded(codec, step):
    return codec.encode(step, optree.tree_leaves(step.observation))


@settings(max_examples=40)
@given(raw_specs, st.integers(1, 3), st.integers(0, 9))
def test_timesteps_come_back(raw, num_envs, seed):
    spec = build(raw)
    codec, step = wire.TimestepCodec(spec, num_envs), sound(seed, spec, num_envs)
    message = encoded(codec, step)
    assert codec.payload(message) == pb.ActRequest.FromString(message).timestep  # the fast path is protobuf
    assert pb.ActRequest(timestep=bytes(codec.payload(message))).SerializeToString() == message
    got = codec.layout.decode(codec.payload(message))
    expected = wire.timestep_leaves(step, optree.tree_leaves(step.observation))
    assert [column.name for column in codec.layout.columns][:2] == ["reward", "discount"]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@settings(max_examples=40)
@given(raw_specs, st.integers(1, 3), st.integers(0, 9), st.integers(0, 2**40))
def test_actions_come_back(raw, num_envs, seed, version):
    spec = build(raw)
    codec = wire.ActionCodec(spec, num_envs)
    leaves = optree.tree_leaves(values(spec.action, num_envs, np.random.default_rng(seed)))
    message = codec.encode(leaves, version)
    reply = pb.ActReply.FromString(message)
    assert reply.version == version
    got, got_version = codec.decode(message)
    assert got_version == version
    for a, b in zip(got, leaves, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_leaves_lie_as_the_proto_says():
    step = sound()
    image, (vector, discrete) = step.observation["image"], step.observation["pair"]
    raw = b"".join(x.tobytes() for x in (step.reward, step.discount, image, vector, discrete, step.step_type))
    assert bytes(CODEC.payload(encoded(CODEC, step))) == raw
    names = [column.name for column in CODEC.layout.columns]
    assert names == ["reward", "discount", "observation/image", "observation/pair/0", "observation/pair/1", "step_type"]


@pytest.mark.parametrize("size", [126, 127, 128, 129, 16383, 16384])
def test_length_prefixes_of_every_width(size):
    spec = EnvSpec("env", ArraySpec((size - 9,), "uint8"), ArraySpec((), "int32", 2))
    codec, step = wire.TimestepCodec(spec, 1), sound(0, spec, 1)
    message = encoded(codec, step)
    assert codec.layout.num_bytes == size
    assert pb.ActRequest.FromString(message).timestep == codec.payload(message)


def test_rows_are_not_copied_and_cannot_be_written():
    message = encoded(CODEC, sound())
    for leaf in CODEC.layout.decode(CODEC.payload(message)):
        assert leaf.base is not None
        with pytest.raises(ValueError, match="read-only"):
            leaf[...] = 0


@settings(max_examples=40)
@given(raw_specs, st.integers(1, 3), st.integers(1, 4))
def test_many_messages_are_read_at_once_and_answered_from_one_batch(raw, num_envs, count):
    spec = build(raw)
    codec, actions = wire.TimestepCodec(spec, num_envs), wire.ActionCodec(spec, num_envs)
    payloads = [codec.payload(encoded(codec, sound(seed, spec, num_envs))) for seed in range(count)]
    rows = [column.spec.zeros(count * num_envs) for column in codec.layout.columns]
    codec.layout.decode_into(rows, payloads)
    leaves = optree.tree_leaves(values(spec.action, count * num_envs, np.random.default_rng(0)))
    for i, payload in enumerate(payloads):
        part = slice(i * num_envs, (i + 1) * num_envs)
        for a, b in zip(rows, codec.layout.decode(payload), strict=True):
            np.testing.assert_array_equal(a[part], b)
        got, version = actions.decode(actions.encode(leaves, i, part.start))
        assert version == i
        for a, b in zip(got, leaves, strict=True):
            np.testing.assert_array_equal(a, b[part])


def test_other_protobuf_forms_of_the_message_are_accepted():
    payload = bytes(CODEC.payload(encoded(CODEC, sound())))
    plain = pb.ActRequest(timestep=payload).SerializeToString()
    unknown_field = b"\x98\x06\x07"  # field 99, varint 7
    twice = pb.ActRequest(timestep=b"old").SerializeToString() + plain  # the last one counts
    long_varint = b"\x12" + bytes([len(payload) & 0x7F | 0x80, len(payload) >> 7 | 0x80, 0x00]) + payload
    for message in (plain, plain + unknown_field, unknown_field + plain, twice, long_varint):
        assert bytes(CODEC.payload(message)) == payload


def test_messages_that_cannot_be_used_name_the_field():
    message = encoded(CODEC, sound())
    attach = pb.ActRequest(attach=pb.Attach(actor_id=1)).SerializeToString()
    with pytest.raises(wire.WireError, match="request of 3 bytes is not an ActRequest"):
        CODEC.payload(b"\xff\xff\xff")
    with pytest.raises(wire.WireError, match="not an ActRequest"):
        CODEC.payload(message[:-1])
    for other in (attach, b""):
        with pytest.raises(wire.WireError, match="request is not a timestep"):
            CODEC.payload(other)
    with pytest.raises(wire.WireError, match=r"timestep has 3 bytes; 4 environments of this spec make 120 .*image"):
        CODEC.payload(pb.ActRequest(timestep=b"abc").SerializeToString())
    reply = wire.ActionCodec(SPEC, N)
    with pytest.raises(wire.WireError, match="reply is not an ActReply"):
        reply.decode(b"\xff")
    with pytest.raises(wire.WireError, match="action has 0 bytes; this group needs 48"):
        reply.decode(b"")


@given(st.binary(max_size=200), st.integers(0, 120))
def test_random_bytes_raise_nothing_but_wire_error(tail, kept):
    message = encoded(CODEC, sound())[:kept] + tail
    for decode in (CODEC.payload, wire.parse_request, wire.ActionCodec(SPEC, N).decode):
        with contextlib.suppress(wire.WireError):
            decode(message)


@given(st.data())
def test_random_payloads_of_the_right_size_are_judged_not_crashed_on(data):
    payload = data.draw(st.binary(min_size=CODEC.layout.num_bytes, max_size=CODEC.layout.num_bytes))
    rows = CODEC.layout.decode(memoryview(payload))
    starts = np.array(data.draw(st.lists(st.booleans(), min_size=N, max_size=N)))
    verdict = wire.check_rows(CODEC.layout.columns, rows, starts)
    assert verdict is None or len(verdict) > 10


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"reward": np.zeros(N, np.float64)}, r"reward is float64\[4\]; the spec says float32\[4\]"),
        ({"reward": np.zeros((N, 1), np.float32)}, r"reward is float32\[4, 1\]"),
        ({"discount": np.zeros(N + 1, np.float32)}, r"discount is float32\[5\]"),
        ({"step_type": np.zeros(N, np.int64)}, r"step_type is int64\[4\]; the spec says uint8"),
    ],
)
def test_an_environment_that_breaks_its_spec_is_told(change, named):
    with pytest.raises(wire.WireError, match=named):
        encoded(CODEC, sound()._replace(**change))


def test_a_leaf_that_is_not_contiguous_travels_all_the_same():
    step = sound()
    image = np.asfortranarray(np.random.default_rng(1).integers(0, 255, (N, 3, 3)).astype(np.uint8))
    message = encoded(CODEC, step._replace(observation={**step.observation, "image": image}))
    np.testing.assert_array_equal(CODEC.layout.decode(CODEC.payload(message))[2], image)


FIRST, MID, LAST = (np.full(N, t, np.uint8) for t in StepType)
START = np.ones(N, bool)


def verdict(starts=START, **change):
    step = sound()._replace(**change)
    leaves = wire.timestep_leaves(step, optree.tree_leaves(step.observation))
    return wire.check_rows(CODEC.layout.columns, leaves, starts)


def with_value(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def test_sound_rows_pass():
    assert verdict() is None
    assert verdict(~START, step_type=MID) is None
    assert verdict(~START, step_type=LAST) is None
    assert verdict(np.array([True, False] * 2), step_type=np.array([0, 1, 0, 2], np.uint8)) is None
    assert verdict(discount=np.full(N, 0.5, np.float32)) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(value):
    step = sound()
    assert verdict(reward=with_value(step.reward, 2, value)).startswith(f"reward of environment 2 is {value}")
    assert verdict(discount=with_value(step.discount, 3, value)).startswith("discount of environment 3")
    vector, discrete = step.observation["pair"]
    observation = {**step.observation, "pair": (with_value(vector, (1, 0), value), discrete)}
    assert verdict(observation=observation).startswith("observation/pair/0 of environment 1")


@pytest.mark.parametrize("value", [3, 7, 255])
def test_step_types_that_do_not_exist(value):
    assert verdict(step_type=with_value(FIRST, 1, value)).startswith(f"step_type is {value}; allowed are 0 (FIRST)")


def test_step_types_out_of_order():
    assert verdict(step_type=with_value(FIRST, 1, StepType.MID)).startswith(
        "step_type of environment 1 is MID; it must be FIRST after LAST"
    )
    assert verdict(step_type=with_value(FIRST, 0, StepType.LAST)).startswith("step_type of environment 0 is LAST")
    assert verdict(~START, step_type=with_value(MID, 3, StepType.FIRST)).startswith(
        "step_type of environment 3 is FIRST; it may be FIRST only after LAST"
    )


@pytest.mark.parametrize("value", [1.5, -0.1])
def test_discounts_out_of_range(value):
    assert verdict(discount=with_value(np.ones(N, np.float32), 1, value)).startswith("discount ranges over [")


def test_discrete_observations_out_of_range():
    step = sound()
    vector, discrete = step.observation["pair"]
    for value in (5, -1):
        observation = {**step.observation, "pair": (vector, with_value(discrete, 2, value))}
        assert verdict(observation=observation).startswith(f"observation/pair/1 of environment 2 is {value}")
