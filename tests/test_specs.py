"""Specs survive JSON, hostile JSON is refused with ValueError and nothing else, and differences name their leaf."""

import dataclasses
import json

import optree
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spec_strategies import build, raw_specs

from seedx import specs
from seedx.types import ArraySpec, EnvSpec

F2 = ArraySpec((2,), "float32")
SPEC = EnvSpec(
    "env",
    {"image": ArraySpec((4, 4), "uint8"), "vector": F2},
    (ArraySpec((), "int32", 3), ArraySpec((2,), "float32", None, -1.0, (1.0, 2.0))),
    frame_skip=4,
)
LEAF = {"shape": [2], "dtype": "float32", "num_values": None, "minimum": None, "maximum": None}


@settings(max_examples=40)
@given(raw_specs)
def test_round_trip(raw):
    spec = build(raw)
    back = specs.from_json(specs.to_json(spec))
    assert back == spec
    assert optree.tree_structure(back.observation) == optree.tree_structure(spec.observation)
    assert specs.differences(spec, back) == []


def test_leaves_travel_in_the_order_of_sorted_keys():
    tree = {"b": F2, "a": (F2, {"d": F2, "c": F2})}
    assert [path for path, _ in specs.leaves(tree)] == ["a/0", "a/1/c", "a/1/d", "b"]
    assert specs.leaves(F2) == [("", F2)]


@pytest.mark.parametrize("tree", [{10: F2, 9: F2}, {"a": [F2, {None: F2}]}, {"a": None}, {"a": 3}])
def test_trees_that_would_come_back_in_another_order_are_refused(tree):
    """JSON knows string keys only, and "10" < "9": the server would read the leaves in another order."""
    with pytest.raises(TypeError, match="spec tree holds"):
        specs.to_json(EnvSpec("env", tree, F2))


def test_insertion_order_is_no_order():
    from collections import OrderedDict

    tree = OrderedDict([("b", F2), ("a", F2)])
    with pytest.raises(TypeError, match="OrderedDict"):
        specs.to_json(EnvSpec("env", tree, F2))


def broken(observation, **top):
    return json.dumps({"env": "e", "frame_skip": 1, "observation": observation, "action": {"leaf": LEAF}, **top})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "3",
        "null",
        "[]",
        "{}",
        broken(3),
        broken(None),
        broken({}),
        broken({"leaf": LEAF, "dict": {}}),
        broken({"dict": [1]}),
        broken({"tuple": 3}),
        broken({"list": []}),
        broken({"leaf": 3}),
        broken({"leaf": {}}),
        broken({"leaf": LEAF}, frame_skip=float("inf")),
        broken({"leaf": LEAF}, frame_skip=float("nan")),
        broken({"leaf": LEAF}, frame_skip=[]),
        broken({"leaf": LEAF}, frame_skip=0),
        broken({"leaf": LEAF}, frame_skip=-1),
        broken({"leaf": LEAF}, frame_skip=1.5),
        *(broken({"leaf": {**LEAF, "shape": s}}) for s in (3, [-1], [1.5], ["2"], [None], [float("inf")], [True])),
        *(broken({"leaf": {**LEAF, "shape": s}}) for s in ([2**62], [2**20] * 4, [10**300], [1] * 40)),
        *(
            broken({"leaf": {**LEAF, "dtype": d}})
            for d in ("", "x", None, 3, "O", "object", "U3", "S", "V8", "complex64", "datetime64[s]", ["f4"], "f4,i4")
        ),
        *(broken({"leaf": {**LEAF, "dtype": "int32", "num_values": n}}) for n in (-1, 0, 1.5, "3", True, 10**30)),
        *(broken({"leaf": {**LEAF, "minimum": b}}) for b in ("x", {}, ["x"], [[1.0]], True, [None])),
        broken({"leaf": LEAF}).replace(": {", ": " + '{"tuple": [' * 900 + "{", 1).replace("}}", "}}" + "]}" * 900, 1),
        "[" * 100_000,
        '{"env":' * 50_000,
        broken({"leaf": LEAF})[:-1] + ', "frame_skip": ' + "9" * 5000 + "}",
    ],
)
def test_hostile_json_is_refused_with_a_value_error(text):
    with pytest.raises(ValueError, match=r".{10}"):
        specs.from_json(text)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(LEAF)),
    lambda child: (
        st.lists(child, max_size=4)
        | st.dictionaries(
            st.sampled_from(["leaf", "dict", "tuple", *LEAF, "env", "observation", "action", "frame_skip"]), child
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["env", "observation", "action", "frame_skip"]), _json), st.data())
@example({"env": "e", "frame_skip": 1, "observation": {"leaf": LEAF}, "action": {"leaf": LEAF}}, None)
def test_fuzzed_json_is_a_spec_or_a_value_error(raw, data):
    if data is not None and data.draw(st.booleans()):
        # A sound spec with one thing replaced, deep inside.
        raw = json.loads(specs.to_json(SPEC))
        nodes = [raw]
        for node in nodes:
            nodes += [c for c in (node.values() if isinstance(node, dict) else node) if isinstance(c, (dict, list))]
        node = data.draw(st.sampled_from(nodes))
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if keys:
            node[data.draw(st.sampled_from(keys))] = data.draw(_json)
    try:
        spec = specs.from_json(json.dumps(raw))
    except ValueError:
        return
    # Whatever is accepted can be used: laid out, compared, and written again.
    for _, leaf in [*specs.leaves(spec.observation), *specs.leaves(spec.action)]:
        assert dataclasses.replace(leaf, shape=()).zeros(1).nbytes <= 16
        hash(leaf)
    specs.from_json(specs.to_json(spec))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"env": "other"}, ["env is 'other', the server expects 'env'"]),
        ({"frame_skip": 1}, ["frame_skip is 1, the server expects 4"]),
        (
            {"observation": {**SPEC.observation, "vector": ArraySpec((3,), "float32")}},
            ["observation/vector is float32[3], the server expects float32[2]"],
        ),
        (
            {"observation": {"image": SPEC.observation["image"], "velocity": F2}},
            [
                "observation/vector is absent, the server expects float32[2]",
                "observation/velocity is float32[2], the server expects absent",
            ],
        ),
        (
            {"action": (ArraySpec((), "int32", 4), SPEC.action[1])},
            ["action/0 is int32[] of 4 values, the server expects int32[] of 3 values"],
        ),
        (
            {"action": (SPEC.action[0], F2)},
            ["action/1 is float32[2], the server expects float32[2] in [-1.0, (1.0, 2.0)]"],
        ),
        ({"observation": F2}, ["observation is float32[2], the server expects absent"]),
    ],
)
def test_differences_name_the_leaf(change, expected):
    found = specs.differences(SPEC, dataclasses.replace(SPEC, **change))
    assert set(expected) <= set(found)
    assert len(found) == len(expected) or "observation" in change


@settings(max_examples=40)
@given(raw_specs, raw_specs, st.booleans())
def test_differences_are_empty_only_between_equals(raw_a, raw_b, same):
    a, b = build(raw_a), build(raw_a if same else raw_b)

    def flat(spec):
        return spec.env, spec.frame_skip, specs.leaves(spec.observation), specs.leaves(spec.action)

    assert (specs.differences(a, b) == []) == (flat(a) == flat(b))
