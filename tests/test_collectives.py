"""What devices send each other in an update: no more than a ring must; and the counter that says so."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import scaling_collectives as collectives
from hlo_bytes import Sent, ring_bytes, sent

from seedx import sharding

MOST = 1.05  # of the ring's bytes
PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: f32[16,8]) -> f32[2,8] {
  %whole = f32[16,8]{1,0:T(8,128)} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %own = f32[2,8]{1,0} dynamic-slice(%whole, %index), dynamic_slice_sizes={2,8}
}

%inner (p: (s32[], f32[10])) -> (s32[], f32[10]) {
  %send = bf16[10]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %both = (s32[], f32[10]) tuple(%i, %y)
}

%body (p: (s32[], f32[10])) -> (s32[], f32[10]) {
  %part = f32[100]{0} all-gather(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  ROOT %w = (s32[], f32[10]) while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%fused (p: f32[8]) -> f32[8] {
  ROOT %twice = f32[8] add(%p, %p)
}

ENTRY %main.1 (p0: f32[8], p1: f32[10]) -> f32[8] {
  %w = (s32[], f32[10]{0:T(256)}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %two = (f32[10]{0}, /*index=1*/f32[6]{0}) all-reduce(%a, %b), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %alone = f32[1000]{0} all-reduce(%a), replica_groups=[8,1]<=[8], to_apply=%add
  %begun = (f32[4]{0}, f32[32]{0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %done = f32[32]{0} all-gather-done(%begun)
  %named = s8[12]{0} all-to-all(%a), replica_groups=mesh['x'=4,'y'=2] device_ids=([2,4]T(1,0)) {'x'}, dimensions={0}
  %rs = f32[3]{0} reduce-scatter(%a), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, metadata={op_name="all-to-all("}
  %fused_rs = f32[2,8]{1,0} fusion(%m), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %f = f32[8] fusion(%p0), kind=kLoop, calls=%fused
}
"""


def test_bytes_worked_by_hand():
    found = sent(PROGRAM, 8)
    assert found == {
        "all-reduce": Sent(2 * 3 / 4 * 4 * 16, 1),  # two arrays in one, in rings of four
        "reduce-scatter": Sent(3 / 4 * 4 * 4 * 3 + 7 / 8 * 4 * 128, 2),  # of a quarter; and as a TPU fuses it
        "all-gather": Sent(3 * 1 / 2 * 400 + 7 / 8 * 128, 4),  # in a loop of three; and one begun and ended
        "all-to-all": Sent(3 / 4 * 12, 1),
        "collective-permute": Sent(3 * 5 * 20.0, 15),  # in a loop in that loop
    }


def test_a_loop_that_sends_and_does_not_say_how_often_is_refused():
    with pytest.raises(ValueError, match="how often does this loop turn, which sends"):
        sent(PROGRAM.replace("known_trip_count", "unknown"), 8)


def assert_no_more_than(found, wanted):
    assert sum(found.values()) <= MOST * sum(wanted.values())
    for operation, num_bytes in wanted.items():
        assert num_bytes / MOST <= found.get(operation, 0.0) or not num_bytes
        assert found.get(operation, 0.0) <= MOST * num_bytes or num_bytes < 0.01 * sum(wanted.values())


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_an_update_of_a_language_model_sends_what_a_ring_must(zero, data, fsdp):
    texts, size = collectives.language_model(sharding.serve_mesh(data=data, fsdp=fsdp), zero)
    assert_no_more_than(collectives.counted(texts), collectives.ring(zero, size, data, fsdp))


def test_an_update_of_impala_sends_what_a_ring_must():
    texts, size = collectives.impala()
    assert_no_more_than(collectives.counted(texts), {"all-reduce": ring_bytes("all-reduce", size, 8)})
