"""Compiles the programs of a decode engine: first all at a time from shapes alone, then each is run once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np

from seedx.inference.decode_programs import IDLE, Order, Programs
from seedx.inference.memory_plan import MemoryPlan
from seedx.inference.slot_state import SlotState
from seedx.types import Tree

Progress = Callable[[int, int], None]  # (programs that are ready, all programs)


def run_all(programs: Programs, plan: MemoryPlan, params: Tree, slots: SlotState) -> None:
    """Calls every program with every shape that can come; the slots are idle, and as short as can be."""
    shapes = [*((1, bucket) for bucket in plan.buckets), *plan.batches]
    rows = [_prefill(programs, params, shape) for shape in shapes][:1]  # all have one shape
    rows += [_stage(programs, plan, params, span) for span in plan.staged_spans]
    lengths = [plan.chunk, *plan.staged_spans]
    nowhere = np.zeros((3, plan.num_slots), np.int32)
    for span in plan.spans:
        if span != slots.span:
            slots.resize(span)
        for length, row in zip(lengths, rows, strict=True):
            if length <= max(span, plan.chunk):
                slots.insert(row, nowhere, 0)
        slots.generate(params, np.zeros((len(Order), plan.num_slots), np.int32))
    for span in plan.spans[-2::-1]:
        slots.resize(span)


def _prefill(programs: Programs, params: Tree, shape: tuple[int, int]) -> Tree:
    return programs.prefill(params, np.zeros(shape, np.int32), np.full(shape, IDLE, np.int32))


def _stage(programs: Programs, plan: MemoryPlan, params: Tree, span: int) -> Tree:
    tokens, first = np.zeros((1, plan.chunk), np.int32), np.int32(0)
    staged, block = programs.extend(params, programs.fresh_staging(span), tokens, first)
    return programs.write_block(staged, block, first)


def compile_all(programs: Programs, plan: MemoryPlan, params: Tree, progress: Progress | None) -> None:
    """Compiles what `run_all` will run, on all cores; nothing is allocated."""
    traced = trace_all(programs, plan, params)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = [pool.submit(lambda program=program: program.lower().compile()) for _, program in traced]
        for ready, program in enumerate(as_completed(compiling), 1):
            program.result()
            if progress is not None:
                progress(ready, len(traced))


def trace_all(programs: Programs, plan: MemoryPlan, params: Tree) -> list[tuple[str, Any]]:
    """What `run_all` runs, by name and traced; parameters may be shapes with shardings."""
    traced: dict[tuple, Any] = {}

    def tracing(name: str, program: Any) -> Callable[..., Any]:
        def trace(*args: Any) -> Any:
            key = name, *(getattr(leaf, "shape", leaf) for leaf in jax.tree.leaves(args))
            if key not in traced:
                traced[key] = program.trace(*args)
            return traced[key].out_info

        return trace

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    tracers = Programs(*map(tracing, Programs._fields, programs))
    run_all(tracers, plan, shapes, SlotState(tracers, plan, tracers.fresh()))
    return [(name, program) for (name, *_), program in traced.items()]
