"""Items and bytes a second of a replay, apart from acting and learning.

    python benchmarks/replay.py embedded     # the table in the learner's process
    python benchmarks/replay.py snapshot     # the table's snapshots, on the disk of the working directory
    python benchmarks/replay.py reverb       # our client of a Reverb server against dm-reverb's own; needs uv

Rates of the embedded table are by the CPU time of the one thread that calls, so that other load matters little. Those
of Reverb are by the clock, of both clients in turn on one server; what counts is the median of the ratios of such
pairs. Targets: inserts at least 0.9 of those with its TrajectoryWriter, samples at least as many.
Those of snapshots are by the clock; a pause is how long the table is locked at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType

import envpool
import jax
import numpy as np

from seedx.config import TableConfig
from seedx.replay.description import table_description
from seedx.replay.priorities import checked
from seedx.replay.rate_limiter import limits_for
from seedx.replay.reverb_replay import ReverbReplay
from seedx.replay.roster import Roster
from seedx.replay.snapshot import Snapshots
from seedx.replay.sum_tree import SumTree
from seedx.replay.table import Table
from seedx.types import TimeStep, Tree, Unroll

ITEMS = 1_000_000
BATCH = 512
PIXEL_ITEMS = 500
PIXEL_ROWS = 81
PIXEL_BATCH = 32
FRAME_ITEMS = 128  # of a round
FRAME_ROWS = 21
FRAME_BATCH = 32
ROUNDS = 9
TIMEOUT_S = 60.0
ROOT = Path(__file__).parent.parent


def seconds_each(call: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of a call, after a tenth as many to warm up."""
    times = []
    for _ in range(repeats + repeats // 10):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return statistics.median(times[repeats // 10 :])


def print_rates(name: str, seconds: float) -> None:
    """A batch was sampled and given new priorities: counted once for each item, and once for each operation."""
    print(f"RESULT {name}_items_sampled_and_updated {BATCH / seconds:.0f} items/s")
    print(f"RESULT {name}_samples_plus_updates {2 * BATCH / seconds:.0f} operations/s")


def pixel_unrolls(count: int) -> Unroll:
    """Unrolls as an Atari actor makes them, time-major in memory."""
    frames = np.random.default_rng(0).integers(0, 256, (PIXEL_ROWS, count, 84, 84, 1), np.uint8)
    rows = np.moveaxis(np.zeros((PIXEL_ROWS, count), np.float32), 1, 0)
    timestep = TimeStep(rows.astype(np.uint8), rows, rows, np.moveaxis(frames, 1, 0))
    return Unroll(
        timestep, rows.astype(np.int32), {"q": rows}, rows.astype(np.int32), np.zeros((count, 512), np.float32)
    )


def embedded() -> None:
    rng = np.random.default_rng(0)
    priorities = rng.random(ITEMS)

    tree = SumTree(ITEMS)
    tree.set(np.arange(ITEMS), priorities)

    def tree_step() -> None:
        found = tree.find(rng.random(BATCH))
        tree.set(found, tree.get(found) / tree.total)

    print_rates("replay_tree", seconds_each(tree_step, 2000))

    settings = TableConfig(sampler="prioritized", max_size=ITEMS, max_times_sampled=0)
    roster = Roster(settings, seed=0)
    roster.add(priorities, roster.make_room(ITEMS))

    def roster_step() -> None:
        draws = roster.sample(BATCH)
        roster.update(draws.keys, checked(draws.probabilities, BATCH, settings.priority_exponent))

    print_rates("replay_without_data", seconds_each(roster_step, 2000))

    table = Table(settings, limits_for(settings, BATCH), seed=0)
    table.insert({"x": np.zeros((ITEMS, 4), np.float32)}, priorities, 1.0)

    def table_step() -> None:
        sample = table.sample(BATCH, 1.0)
        table.update_priorities(sample.keys, sample.probabilities)

    print_rates("replay_with_16_bytes", seconds_each(table_step, 2000))
    table.close()
    pixels()


def pixels() -> None:
    """Bytes a second into and out of a table of Atari unrolls."""
    settings = TableConfig(sampler="prioritized", max_size=PIXEL_ITEMS, max_times_sampled=0)
    table = Table(settings, limits_for(settings, PIXEL_BATCH), seed=0)
    items = pixel_unrolls(PIXEL_BATCH)
    gigabytes = table.needs(items).item_bytes * PIXEL_BATCH / 1e9
    ones = np.ones(PIXEL_BATCH)
    insert = seconds_each(lambda: table.insert(items, ones, 1.0), 40)  # the table is full when it is measured
    sample = seconds_each(lambda: table.sample(PIXEL_BATCH, 1.0), 20)
    print(f"RESULT replay_pixels_inserted {gigabytes / insert:.2f} GB/s")
    print(f"RESULT replay_pixels_sampled {gigabytes / sample:.2f} GB/s")
    print(f"RESULT replay_pixels_batch_of_{PIXEL_BATCH} {1000 * sample:.1f} ms")


# ---- snapshots


class Watched(threading.Condition):
    """A table's lock that notes for how long one thread holds it at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.current_thread()
        self.pauses: list[float] = []
        self._depth = 0

    def __enter__(self) -> bool:
        entered = super().__enter__()
        if threading.current_thread() is self.thread:
            self._depth += 1
            if self._depth == 1:
                self._since = time.perf_counter()
        return entered

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        if threading.current_thread() is self.thread:
            self._depth -= 1
            if self._depth == 0:
                self.pauses.append(time.perf_counter() - self._since)
        super().__exit__(exc_type, exc_val, exc_tb)


def snapshot() -> None:
    """Saves and loads full tables; then saves each again, of which a tenth is new, while another thread samples."""
    ids = np.arange(1000, dtype=np.float32)
    small = {"x": np.repeat(ids[:, None], 25, axis=1)}
    measure_snapshot("pixels", pixel_unrolls(PIXEL_BATCH), 1600)
    measure_snapshot("100_bytes", small, 100_000)
    measure_snapshot("100_bytes", small, 1_000_000)


def measure_snapshot(name: str, items: Tree, count: int) -> None:
    settings = TableConfig(sampler="prioritized", max_size=count, max_times_sampled=0, max_bytes=2**31)
    table, again = (Table(settings, limits_for(settings, 1), seed=0) for _ in range(2))
    batch = len(jax.tree.leaves(items)[0])
    example = jax.tree.map(lambda leaf: leaf[:1], items)
    name = f"snapshot_{name}_{count}"

    def insert(some: int) -> None:
        for _ in range(some // batch):
            table.insert(items, np.ones(batch), 1.0)

    insert(count)
    size = table.info()["replay/bytes"]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        saver = Snapshots(Path(directory), 2**32, table, example)
        table._changed = table._waiting.changed = lock = Watched()
        started = time.perf_counter()
        assert saver.save()
        print(f"RESULT {name}_saved {size / 1e6 / (time.perf_counter() - started):.0f} MB/s")
        print(f"RESULT {name}_longest_pause {1000 * max(lock.pauses):.1f} ms")
        print(f"RESULT {name}_paused {sum(lock.pauses) / (time.perf_counter() - started):.3f} share")
        started = time.perf_counter()
        assert Snapshots(Path(directory), 2**32, again, example).load() == count
        print(f"RESULT {name}_loaded {size / 1e6 / (time.perf_counter() - started):.0f} MB/s")
        again.close()
        insert(count // 10)
        lock.pauses.clear()
        stop, waits = threading.Event(), []
        sampling = threading.Thread(target=sample_until, args=(table, stop, waits))
        sampling.start()
        time.sleep(1.0)
        quiet, started = len(waits), time.perf_counter()
        assert saver.save()
        print(f"RESULT {name}_tenth_saved {time.perf_counter() - started:.2f} s")
        stop.set()
        sampling.join()
        print(f"RESULT {name}_tenth_longest_pause {1000 * max(lock.pauses):.1f} ms")
        for when, some in (("before", waits[:quiet]), ("meanwhile", waits[quiet:])):
            print(f"RESULT {name}_sampled_{when} {1000 * statistics.median(some):.2f} ms")
            print(f"RESULT {name}_slowest_sample_{when} {1000 * max(some):.2f} ms")
    table.close()


def sample_until(table: Table, stop: threading.Event, waits: list[float]) -> None:
    """Samples all the time; notes how long each took, seconds."""
    while not stop.is_set():
        started = time.perf_counter()
        table.sample(PIXEL_BATCH, 10.0)
        waits.append(time.perf_counter() - started)
        time.sleep(0.01)


# ---- Reverb


def reverb() -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        unrolls = {"random": random_frames(), "pong": pong_frames()}
        settings = TableConfig(sampler="uniform", max_size=FRAME_ITEMS, max_times_sampled=0)
        tables, port = Path(directory, "tables.json"), free_port()
        tables.write_text(json.dumps([table_description(settings, FRAME_BATCH, name) for name in unrolls]))
        flags = ("--port", str(port), "--config", tables, "--checkpoint-dir", directory, "--allow-unauthenticated")
        stack.enter_context(script(ROOT / "launch" / "reverb_server.py", *flags, ready="serving"))
        official = stack.enter_context(script(ROOT / "benchmarks" / "reverb_official.py", f"localhost:{port}"))
        for name, frames in unrolls.items():
            np.save(Path(directory, name), frames)
            replay = ReverbReplay(f"reverb://localhost:{port}", name)
            compare(name, frames, replay, lambda what, name=name: obey(official, what, name, f"{directory}/{name}.npy"))
            replay.close()


def compare(name: str, frames: np.ndarray, replay: ReverbReplay, official: Callable[[str], float]) -> None:
    """Prints seconds and ratios of pairs of rounds that take turns."""
    items, ones = Unroll(TimeStep(None, None, None, frames), None, None, None, None), np.ones(FRAME_BATCH)

    def insert() -> None:
        for _ in range(FRAME_ITEMS // FRAME_BATCH):
            replay.insert(items, ones, TIMEOUT_S)

    def sample() -> None:
        for _ in range(FRAME_ITEMS // FRAME_BATCH):
            replay.sample(FRAME_BATCH, TIMEOUT_S)

    for ours, theirs in ((insert, "insert"), (insert, "legacy"), (sample, "sample")):
        pairs = [(seconds(ours), official(theirs)) for _ in range(1 + ROUNDS)][1:]
        for whose, times in zip(("seedx", "official"), zip(*pairs, strict=True), strict=True):
            rate = FRAME_ITEMS / statistics.median(times)
            print(f"RESULT reverb_{name}_{theirs}_{whose} {rate:.0f} items/s")
        ratio = statistics.median(theirs_s / ours_s for ours_s, theirs_s in pairs)
        print(f"RESULT reverb_{name}_{theirs}_ratio {ratio:.2f} of the official client's", flush=True)


def seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def obey(official: subprocess.Popen[str], what: str, table: str, file: str) -> float:
    """Seconds that the official client took."""
    assert official.stdin is not None
    assert official.stdout is not None
    official.stdin.write(f"{what} {table} {file} {FRAME_ITEMS}\n")
    official.stdin.flush()
    return float(official.stdout.readline())


@contextlib.contextmanager
def script(path: Path, *flags: str | Path, ready: str = "ready") -> Generator[subprocess.Popen[str], None, None]:
    """A script of another environment, from when it says that it is ready; it ends with its input or by a signal."""
    command = ["uv", "run", "--quiet", "--script", path, *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            if not any(ready in line for line in process.stdout):
                raise RuntimeError(f"{path} ended before it was ready; run it by hand.")
            yield process
        finally:
            process.terminate()


def random_frames() -> np.ndarray:
    """Unrolls that nothing compresses, uint8 `[N, T+1, 84, 84, 4]`."""
    return np.random.default_rng(0).integers(0, 256, (FRAME_BATCH, FRAME_ROWS, 84, 84, 4), np.uint8)


def pong_frames() -> np.ndarray:
    """Unrolls of Pong, as an agent with stacked frames sees it, uint8 `[N, T+1, 84, 84, 4]`."""
    envs = envpool.make("Pong-v5", "gymnasium", num_envs=FRAME_BATCH, seed=1)
    envs.reset()
    rng = np.random.default_rng(0)
    frames = [envs.step(rng.integers(0, 6, FRAME_BATCH))[0] for _ in range(60 + FRAME_ROWS)]
    return np.ascontiguousarray(np.moveaxis(np.stack(frames[-FRAME_ROWS:], axis=1), 2, -1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parts = {"embedded": embedded, "snapshot": snapshot, "reverb": reverb}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=parts)
    parts[parser.parse_args().what]()


if __name__ == "__main__":
    main()
