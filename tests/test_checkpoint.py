"""Checkpoints: bit-exact, atomic, sharded, readable by plain Orbax, and never silently wrong."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from bits import assert_bit_equal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from seedx.checkpoint import Checkpointer, CheckpointError, CheckpointMismatchError, load_params

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(optax.linear_schedule(1e-3, 0.0, 9)))


def make_params(offset: float = 0.0) -> dict:
    rng = np.random.default_rng(3)
    kernel = rng.normal(size=(16, 24)).astype(np.float32) + np.float32(offset)
    return {
        "torso": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(rng.normal(size=24), jnp.bfloat16)},
        "scale": jnp.asarray(np.nextafter(np.float32(1), np.float32(2))),
    }


def make_state(params: dict) -> dict:
    return {
        "optimizer": OPTIMIZER.init(params),
        "key": jax.random.key_data(jax.random.key(0xDEADBEEF)),
        "env_steps": np.asarray(2**40 + 1),
        "updates": 17,
        "special": np.array([np.nan, np.inf, -0.0], np.float32),
    }


def save(run_dir: Path, updates: tuple[int, ...], keep: int = 3) -> None:
    checkpointer = Checkpointer(run_dir, keep=keep)
    for update in updates:
        params = make_params(update)
        assert checkpointer.save(update, params, make_state(params), {"update": update}, block=True)
    checkpointer.close()


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.glob("*/**/*") if p.is_file() and p.name != "commit_success.txt")


def test_round_trip_is_bit_exact(tmp_path):
    save(tmp_path, (5,))
    zeros = jax.tree.map(jnp.zeros_like, make_params())
    restored = Checkpointer(tmp_path).restore(zeros, make_state(zeros))
    assert restored.update == 5
    assert restored.metadata == {"update": 5}
    assert_bit_equal(restored.params, make_params(5))
    assert_bit_equal(restored.state, make_state(make_params(5)))


def test_training_continues_bit_for_bit_after_resume(tmp_path):
    def train(params, opt_state, steps):
        for _ in range(steps):
            grads = jax.tree.map(jnp.sin, params)
            changes, opt_state = OPTIMIZER.update(grads, opt_state, params)
            params = optax.apply_updates(params, changes)
        return params, opt_state

    start = {"x": jnp.linspace(-2, 2, 50), "y": jnp.ones((3, 4))}
    params, opt_state = train(start, OPTIMIZER.init(start), 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(2, params, opt_state, {})
    straight = train(params, opt_state, 2)
    restored = checkpointer.restore(start, OPTIMIZER.init(start))
    assert_bit_equal(train(restored.params, restored.state, 2), straight)


def test_saved_values_survive_donation_right_after_save(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x, n = jnp.arange(2**20, dtype=jnp.float32), np.arange(2**18)
    expected = np.array(x), n.copy()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": x}, {"n": n}, {})
    jax.block_until_ready(overwrite(x))
    n[:] = -1
    restored = checkpointer.restore({"x": jnp.zeros(2**20)}, {"n": n})
    np.testing.assert_array_equal(restored.params["x"], expected[0])
    np.testing.assert_array_equal(restored.state["n"], expected[1])


def test_sharded_arrays_move_to_another_mesh(tmp_path):
    def mesh(shape):
        return jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh((4, 2)), P("data", "tensor")))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": sharded}, {"m": sharded}, {}, block=True)
    wanted = NamedSharding(mesh((2, 4)), P(None, "tensor"))
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)}
    state = {"m": jax.device_put(jnp.zeros_like(x), NamedSharding(mesh((8, 1)), P("data")))}
    restored = checkpointer.restore(template, state)
    assert restored.params["x"].sharding == wanted
    assert restored.state["m"].sharding == state["m"].sharding
    np.testing.assert_array_equal(restored.params["x"], x)
    np.testing.assert_array_equal(restored.state["m"], x)


def test_keeps_the_newest_and_saves_an_update_once(tmp_path):
    save(tmp_path, (1, 2, 30, 100), keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["100", "30"]
    params = make_params()
    again = Checkpointer(tmp_path)
    assert not again.save(100, params, make_state(params), {}, block=True)
    again.close()


def test_save_does_nothing_while_the_previous_one_is_written(tmp_path, monkeypatch):
    gate = threading.Event()
    write_checksums = Checkpointer._write_checksums
    monkeypatch.setattr(Checkpointer, "_write_checksums", lambda self: (gate.wait(60), write_checksums(self))[1])
    params, checkpointer = make_params(), Checkpointer(tmp_path)
    assert checkpointer.save(1, params, {"n": 0}, {})
    assert not checkpointer.save(2, params, {"n": 0}, {})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == []
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_params(tmp_path)
    gate.set()
    assert checkpointer.save(3, params, {"n": 0}, {}, block=True)
    checkpointer.close()
    assert load_params(tmp_path).update == 3


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_every_damaged_file_is_noticed(tmp_path, caplog, damage):
    save(tmp_path / "good", (10, 20))
    names = [p.relative_to(tmp_path / "good") for p in files_of(tmp_path / "good/checkpoints/20")]
    assert len(names) > 10
    names.append(Path("checkpoints/20/checksums.json"))
    for name in names:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "run")
        file = tmp_path / "run" / name
        content = bytearray(file.read_bytes())
        match damage:
            case "delete":
                file.unlink()
            case "truncate":
                file.write_bytes(content[: len(content) // 2])
            case "flip":
                content[len(content) // 2] ^= 4
                file.write_bytes(content)
        caplog.clear()
        loaded = load_params(tmp_path / "run")
        assert (loaded.update, loaded.metadata) == (10, {"update": 10}), name
        assert "checkpoints/20 is damaged" in caplog.text
        assert "checkpoints/10 instead" in caplog.text


def test_restore_sets_a_damaged_checkpoint_aside_so_that_its_update_can_be_saved_again(tmp_path, caplog):
    save(tmp_path, (10, 20))
    shutil.rmtree(tmp_path / "checkpoints/20/state")
    params, checkpointer = make_params(), Checkpointer(tmp_path)
    with caplog.at_level(logging.WARNING):
        restored = checkpointer.restore(params, make_state(params))
    assert_bit_equal(restored.params, make_params(10))
    assert len(list(tmp_path.glob("checkpoints/20.damaged-*/params"))) == 1
    assert checkpointer.save(20, make_params(20), make_state(params), {}, block=True)
    assert checkpointer.restore(params, make_state(params)).update == 20


def test_nothing_good_left_is_an_error_that_names_the_damage(tmp_path):
    save(tmp_path, (10, 20))
    for update in (10, 20):
        (tmp_path / f"checkpoints/{update}/params/_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .*\n  20: params/_METADATA is missing\n  10: "):
        Checkpointer(tmp_path).restore(make_params(), make_state(make_params()))
    assert (tmp_path / "checkpoints/20").exists()  # Nothing better: left in place.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["torso"].update(kernel=jnp.zeros((16, 32))),
            r"params/torso/kernel: .*float32\[16, 24\], run .*32\]",
        ),
        (lambda p: p["torso"].update(bias=jnp.zeros(24)), r"params/torso/bias: checkpoint bfloat16\[24\], run float32"),
        (lambda p: p.update(extra=jnp.zeros(1)), r"params/extra: checkpoint nothing"),
        (lambda p: p.pop("scale"), r"params/scale: checkpoint float32\[\], run nothing"),
    ],
)
def test_mismatch_names_the_leaf_and_does_not_fall_back(tmp_path, change, message):
    save(tmp_path, (10, 20))
    state, params = make_state(make_params()), make_params()
    change(params)
    with pytest.raises(CheckpointMismatchError, match=message):
        Checkpointer(tmp_path).restore(params, state)
    assert (tmp_path / "checkpoints/20").exists()


def test_another_optimizer_is_a_mismatch(tmp_path):
    save(tmp_path, (1,))
    params = make_params()
    state = make_state(params) | {"optimizer": optax.adam(1e-3).init(params)}
    with pytest.raises(CheckpointMismatchError, match=r"state/optimizer/0/count: checkpoint nothing"):
        Checkpointer(tmp_path).restore(params, state)


def test_typed_keys_are_refused_at_save(tmp_path):
    with pytest.raises(TypeError, match="key_data"):
        Checkpointer(tmp_path).save(1, {}, {"key": jax.random.key(0)}, {})


def test_load_params_gives_numpy_and_leaves_no_trace(tmp_path):
    save(tmp_path, (1,))
    before = sorted(tmp_path.rglob("*"))
    loaded = load_params(tmp_path)
    assert loaded.state is None
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(loaded.params))
    assert loaded.params["torso"]["bias"].dtype == ml_dtypes.bfloat16
    assert_bit_equal(loaded.params, make_params(1))
    assert sorted(tmp_path.rglob("*")) == before


# A checkpoint that is dropped while it is read leaves TensorStore with callbacks for an event loop that is gone.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_load_params_beside_a_learner_that_saves_and_drops(tmp_path):
    save(tmp_path, (1,), keep=1)
    done = threading.Event()

    def learn():
        checkpointer = Checkpointer(tmp_path, keep=1)
        for update in range(2, 14):
            checkpointer.save(update, make_params(update), make_state(make_params()), {"update": update}, block=True)
        checkpointer.close()
        done.set()

    learner = threading.Thread(target=learn)
    learner.start()
    seen = []
    while not done.is_set():
        try:
            loaded = load_params(tmp_path)
        except CheckpointError:  # keep=1: the only one was dropped while we read it.
            continue
        assert_bit_equal(loaded.params, make_params(loaded.update))
        seen.append(loaded.update)
    learner.join()
    assert seen == sorted(seen)
    assert load_params(tmp_path).update == 13


def run_python(code: str, *args: object, **kwargs) -> subprocess.CompletedProcess:
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, **kwargs)


def test_plain_orbax_reads_it(tmp_path):
    save(tmp_path, (3, 4))
    code = """
        import sys, json, numpy as np, orbax.checkpoint as ocp
        manager = ocp.CheckpointManager(sys.argv[1])
        args = ocp.args.Composite(params=ocp.args.StandardRestore(), metadata=ocp.args.JsonRestore())
        restored = manager.restore(manager.latest_step(), args=args)
        assert "seedx" not in sys.modules
        kernel = np.asarray(restored.params["torso"]["kernel"])
        print(json.dumps([manager.all_steps(), restored.metadata, kernel.tobytes().hex()]))
    """
    ran = run_python(code, tmp_path / "checkpoints")
    assert ran.returncode == 0, ran.stderr
    steps, metadata, kernel = json.loads(ran.stdout)
    assert sorted(steps) == [3, 4]
    assert metadata == {"update": 4}
    assert_bit_equal(np.frombuffer(bytes.fromhex(kernel), np.float32), np.ravel(make_params(4)["torso"]["kernel"]))


def test_a_killed_save_never_looks_finished(tmp_path):
    code = """
        import os, signal, sys, jax.numpy as jnp
        from seedx.checkpoint import Checkpointer
        checkpointer = Checkpointer(sys.argv[1])
        checkpointer.save(1, {"x": jnp.ones(8)}, {"n": 0}, {}, block=True)
        checkpointer.close()
        # Dies at the last moment: everything is written, only the commit is missing.
        Checkpointer._write_checksums = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(2, {"x": jnp.arange(8.0)}, {"n": 0}, {}, block=True)
    """
    ran = run_python(code, tmp_path)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert ran.stderr == ""
    assert sorted(p.name.split(".")[0] for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]
    assert load_params(tmp_path).update == 1
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(2, {"x": jnp.zeros(8)}, {"n": 0}, {}, block=True)
    checkpointer.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]  # The remains are cleared away.


def test_import_is_cheap(tmp_path):
    code = (
        "import sys, seedx.checkpoint as c; c.Checkpointer(sys.argv[1]); assert 'orbax.checkpoint' not in sys.modules"
    )
    assert run_python(code, tmp_path).returncode == 0


@pytest.mark.parametrize("run_dir", ["file/run", "file"])
def test_unwritable_run_directory(tmp_path, run_dir):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match=r"cannot be written .*--run-dir.*file.*checkpoints"):
        Checkpointer(tmp_path / run_dir)


def test_proc_is_not_writable():
    with pytest.raises(PermissionError, match=r"--run-dir: '/proc/checkpoints'"):
        Checkpointer("/proc")
