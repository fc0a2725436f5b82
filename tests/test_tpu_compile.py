"""What runs on TPUs is compiled for slices that are not there: every jitted function of both modes, in each preset.

Needs libtpu; SEEDX_REQUIRE naming `libtpu` makes its absence fail. The language model is two layers high here;
`benchmarks/scaling.py compile` takes whole ones, and a larger one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TOPOLOGIES = ("v5e:2x4", "v5e:16x16")
HBM_BYTES = 16 * 2**30
# In a process of its own: this one has its own platform and strict promotion.
SCRIPT = """
import dataclasses, json, sys
import scaling_compile
small = dataclasses.replace(scaling_compile.MODELS.pop("smollm2"), num_layers=2)
scaling_compile.MODELS.clear()
scaling_compile.MODELS["smollm2"] = small
for program in scaling_compile.all_programs(sys.argv[1:]):
    print(json.dumps([program.name, program.topology, scaling_compile.chip_bytes(program.compile())]), flush=True)
"""


@pytest.mark.external
def test_all_programs_compile_and_fit_a_chip():
    if importlib.util.find_spec("libtpu") is None:
        if "libtpu" in os.environ.get("SEEDX_REQUIRE", "").split():
            pytest.fail("SEEDX_REQUIRE names libtpu, and it cannot be imported")
        pytest.skip("needs libtpu")
    command = [sys.executable, "-c", SCRIPT, *TOPOLOGIES]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    taken = {(name, where): num_bytes for name, where, num_bytes in map(json.loads, done.stdout.splitlines())}
    assert all(0 < num_bytes <= HBM_BYTES for num_bytes in taken.values()), taken
    presets = {f"smollm2 zero-{zero} {program}" for zero in (1, 2, 3) for program in ("gradient", "step")}
    recipes = {f"{recipe} update" for recipe in ("impala_atari", "r2d2_paper", "impala_pendulum")}
    assert taken.keys() >= {(name, topology) for name in presets | recipes for topology in TOPOLOGIES}
    hosts = {name for name, where in taken if where == "v5e:2x2"}
    assert hosts >= {"impala_atari act", "r2d2_paper act", "smollm2 generate", "smollm2 prefill"}
