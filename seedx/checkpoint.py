"""Checkpoints with Orbax: the whole state of a learner, written in the background, atomic, resumable.

Layout, readable by plain Orbax without this package:

    RUN_DIR/checkpoints/<update>/params     nested dicts of arrays
    RUN_DIR/checkpoints/<update>/state      every other array: optimizer state, keys, counters
    RUN_DIR/checkpoints/<update>/metadata   JSON: config, spec, counters
    RUN_DIR/checkpoints/<update>/checksums.json   SHA-256 of their files (TensorStore does not notice flipped bits)

    args = ocp.args.Composite(params=ocp.args.StandardRestore(), metadata=ocp.args.JsonRestore())
    ocp.CheckpointManager("/absolute/RUN_DIR/checkpoints").restore(update, args=args).params

Orbax takes half a second to import, so it is imported at the first save or restore: a learner serves actions before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx.checks import ConfigError
from seedx.rundir import finished_checkpoints
from seedx.types import Tree

log = logging.getLogger(__name__)


class CheckpointError(ConfigError):
    """No checkpoint can be used; the message says what was tried."""


class CheckpointMismatchError(ConfigError):
    """A sound checkpoint holds other arrays than the run wants; the message names them."""


class Checkpoint(NamedTuple):
    """One restored checkpoint."""

    update: int
    params: Tree
    state: Tree
    metadata: dict[str, Any]


class Checkpointer:
    """Writes the checkpoints of one run, and restores the newest good one. For one thread, the learner's."""

    def __init__(self, run_dir: str | Path, *, keep: int = 3) -> None:
        """Makes `run_dir/checkpoints`, where the newest `keep` checkpoints are kept.

        Raises:
            PermissionError: nothing can be written there.
        """
        self.directory = _directory(run_dir)
        self._keep = keep
        self._manager: Any = None  # ocp.CheckpointManager
        self._saving = -1
        _check_writable(self.directory)

    def save(self, update: int, params: Tree, state: Tree, metadata: Mapping[str, Any], *, block: bool = False) -> bool:
        """Saves the state after `update` updates; returns False if there was nothing to do.

        Returns as soon as the arrays may be donated: Orbax has copied them off the accelerator by then, and on a CPU
        it holds NumPy views, which make XLA copy a donated buffer instead of reusing it. The files are written in the
        background. There is nothing to do if `update` is saved already, or (unless `block`) while the previous save
        is still being written: a slow disk makes checkpoints rarer, not the learner slower.

        Args:
            update: Name of the checkpoint; grows from save to save.
            params: Nested dicts of arrays.
            state: Tree of arrays and numbers, at least one; PRNG keys as `jax.random.key_data`.
            metadata: What JSON can hold.
            block: Waits for the previous save and for this one. For the last save of a run.

        Raises:
            OSError: this save, or the previous one, could not be written. Orbax raises ValueError for some of these.
        """
        manager = self._open()
        if manager.is_saving_in_progress():
            if not block:
                return False
            manager.wait_until_finished()
        if update == manager.latest_step():
            return False
        ocp = _orbax()
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(_arrays(params)),
            state=ocp.args.StandardSave(_arrays(state)),
            metadata=ocp.args.JsonSave(dict(metadata)),
        )
        self._saving = update
        manager.save(update, args=items, force=True)
        if block:
            manager.wait_until_finished()
        return True

    def any(self) -> bool:
        """Whether there is a finished checkpoint, good or not."""
        return bool(finished_checkpoints(self.directory))

    def restore(self, params: Tree, state: Tree) -> Checkpoint:
        """Restores the newest good checkpoint into the shapes, dtypes and shardings of `params` and `state`.

        A damaged one is passed over with a warning and set aside as `<update>.damaged-<time>`.

        Args:
            params: Template: arrays, or `jax.ShapeDtypeStruct`s with a sharding. Any mesh will do.
            state: Template, likewise.

        Raises:
            CheckpointError: there is no checkpoint, or all are damaged.
            CheckpointMismatchError: the newest good one holds other leaves, shapes or dtypes than the templates.
        """
        self.close()
        templates = {"params": _arrays(params), "state": _arrays(state)}
        checkpoint, damaged = _newest_good(self.directory, templates)
        for path in damaged:
            path.rename(path.with_name(f"{path.name}.damaged-{int(time.time())}"))
        return checkpoint

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises what went wrong in the background."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Like `wait`, and ends Orbax's threads. The next save starts them again."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.wait_until_finished()
            manager.close()

    def _open(self) -> Any:
        if self._manager is None:
            ocp = _orbax()
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
                create=False,
                **_by_itself(),
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager

    def _write_checksums(self) -> None:
        """Runs in the background, when all is written but not yet renamed to its final name: part of the commit."""
        for path in self.directory.glob(f"{self._saving}.orbax-checkpoint-tmp*"):
            (path / "checksums.json").write_text(json.dumps(_checksums(path), indent=0))


def load_params(run_dir: str | Path) -> Checkpoint:
    """The newest good checkpoint without its state; params are nested dicts of NumPy arrays.

    Writes nothing, and works beside a learner that still saves.

    Raises:
        CheckpointError: there is no checkpoint, or all are damaged.
    """
    return _newest_good(_directory(run_dir), {"params": None})[0]


def _directory(run_dir: str | Path) -> Path:
    return Path(run_dir).absolute() / "checkpoints"


def _orbax() -> ModuleType:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every step there; failures are raised as well.
    return ocp


def _by_itself() -> dict[str, Any]:
    """Options that keep Orbax from waiting for the other hosts of a learner: only the first one writes and reads."""
    if jax.process_count() == 1:
        return {}
    index = jax.process_index()
    options = _orbax().options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"host{index}"
    )
    return {"multiprocessing_options": options}


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        text = f"checkpoints cannot be written ({error.strerror}); choose another place with --run-dir"
        raise PermissionError(errno.EACCES, text, os.fspath(directory)) from error


def _arrays(tree: Tree) -> Tree:
    """The tree with numbers as NumPy arrays, which is what Orbax stores."""

    def array(leaf: Any) -> Any:
        if not hasattr(leaf, "sharding"):
            return np.asarray(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"a checkpoint holds no {leaf.dtype} arrays; pass jax.random.key_data(key) instead.")
        return leaf

    return jax.tree.map(array, tree)


def _checksums(path: Path) -> dict[str, str]:
    """SHA-256 of each file of the items of a checkpoint. Orbax writes its commit marks after we look."""
    sums = {}
    for file in sorted(path.glob("*/**/*")):
        if file.is_file() and file.name != "commit_success.txt":
            with file.open("rb") as handle:
                sums[str(file.relative_to(path))] = hashlib.file_digest(handle, "sha256").hexdigest()
    return sums


def _damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are as they were written."""
    try:
        written, found = json.loads((path / "checksums.json").read_text()), _checksums(path)
    except (OSError, ValueError) as error:
        return f"its files cannot be checked: {error}"
    bad = [name for name in written if found.get(name) != written[name]]
    return ", ".join(f"{name} is {'changed' if name in found else 'missing'}" for name in bad[:3]) or None


def _newest_good(directory: Path, templates: dict[str, Tree]) -> tuple[Checkpoint, list[Path]]:
    """The newest checkpoint that is whole, and the paths of newer ones that are damaged."""
    damaged: dict[Path, str] = {}
    # Listed anew each time: a learner may meanwhile have finished one, or dropped the one just tried.
    while left := [path for path in finished_checkpoints(directory) if path not in damaged]:
        path = left[-1]
        if why := _damage(path):
            damaged[path] = why
            continue
        try:
            checkpoint = _read(path, templates)
        except Exception:
            if _damage(path):  # Dropped while it was read.
                continue
            raise
        bad = [other for other in damaged if other.exists()]
        for other in bad:
            log.warning("checkpoint %s is damaged (%s); using %s instead", other, damaged[other], path)
        return checkpoint, bad
    if damaged:
        reasons = "".join(f"\n  {path.name}: {why}" for path, why in damaged.items())
        raise CheckpointError(f"every checkpoint in {directory} is damaged:{reasons}\nStart in another --run-dir.")
    raise CheckpointError(f"there is no checkpoint in {directory}. Was the run stopped before its first save?")


def _read(path: Path, templates: dict[str, Tree]) -> Checkpoint:
    """Reads one checkpoint; an item whose template is None comes as NumPy arrays."""
    metadata = json.loads((path / "metadata" / "metadata").read_text())
    items = {}
    with _orbax().StandardCheckpointer(**_by_itself()) as reader:
        for name, template in templates.items():
            held = reader.metadata(path / name).item_metadata.tree
            if template is None:  # Of NumPy templates only shape and dtype are looked at: broadcast, they cost nothing.
                template = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), held)
            _check_same(path / name, held, template)
            items[name] = reader.restore(path / name, template)
    return Checkpoint(int(path.name), items["params"], items.get("state"), metadata)


def _leaves(tree: Tree) -> dict[str, str]:
    """Type of each leaf by its name, for example {"torso/kernel": "float32[4, 64]"}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{[*x.shape]}" for path, x in leaves}


def _check_same(path: Path, held: Tree, wanted: Tree) -> None:
    theirs, ours = _leaves(held), _leaves(wanted)
    wrong = [
        f"\n  {path.name}/{name}: checkpoint {theirs.get(name, 'nothing')}, run {ours.get(name, 'nothing')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointMismatchError(
            f"checkpoint {path.parent} is of another network or optimizer:{''.join(wrong[:5])}{more}\n"
            "Resume with the settings of the run directory's config.json, or start in another --run-dir."
        )
