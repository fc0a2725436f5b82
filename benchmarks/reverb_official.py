# /// script
# requires-python = "==3.11.*"
# dependencies = ["dm-reverb[tensorflow]==0.14.0"]
# ///
"""The part of replay.py that dm-reverb's own Python client plays: obeys lines of `what table file count`.

Answers each with the seconds that it took. Columns are unrolls [N, T+1, ...] of an .npy file, again and again.
"""

import itertools
import sys
import time

import numpy as np
import reverb  # pyrefly: ignore [missing-import]


def insert(client, table: str, unrolls: np.ndarray, count: int) -> None:
    """With TrajectoryWriter, as its documentation does it."""
    rows = unrolls.shape[1]
    with client.trajectory_writer(num_keep_alive_refs=rows) as writer:
        for unroll in itertools.islice(itertools.cycle(unrolls), count):
            for row in unroll:
                writer.append({"observation": row})
            writer.create_item(table, 1.0, {"observation": writer.history["observation"][-rows:]})
        writer.flush()


def insert_with_legacy_writer(client, table: str, unrolls: np.ndarray, count: int) -> None:
    """With the older Writer, told to make one chunk of an unroll."""
    rows = unrolls.shape[1]
    with client.writer(max_sequence_length=rows, chunk_length=rows) as writer:
        for unroll in itertools.islice(itertools.cycle(unrolls), count):
            for row in unroll:
                writer.append([row])
            writer.create_item(table, rows, 1.0)
        writer.flush()


def sample(client, table: str, unrolls: np.ndarray, count: int) -> None:
    """One array an item."""
    for item in client.sample(table, count, emit_timesteps=False):
        assert item.data[0].shape == unrolls.shape[1:]


if __name__ == "__main__":
    client = reverb.Client(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        what, table, file, count = line.split()
        unrolls = np.load(file)
        started = time.perf_counter()
        {"insert": insert, "legacy": insert_with_legacy_writer, "sample": sample}[what](
            client, table, unrolls, int(count)
        )
        print(time.perf_counter() - started, flush=True)
