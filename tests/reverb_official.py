# /// script
# requires-python = "==3.11.*"
# dependencies = ["dm-reverb[tensorflow]==0.14.0"]
# ///
"""Writes and reads items with Reverb's own client, for the tests.

    reverb_official.py write ADDRESS TABLE FILE     with TrajectoryWriter
    reverb_official.py legacy ADDRESS TABLE FILE    with the older Writer, delta-encoded
    reverb_official.py read ADDRESS TABLE FILE      all items, as many as the table holds

FILE is an .npz of one array [N, ...] for each column, in the order of their names. Names that begin with "state" are
columns of one row, without its axis. Of items that differ in length there is also "lengths"; to write, their columns
are as long as the longest; read, their rows follow each other.
"""

import sys

import numpy as np
import reverb


def rows_of(columns: dict, n: int) -> list[dict]:
    """The rows of item n; a state is in the first only."""
    names = [name for name in columns if not name.startswith("state") and name != "lengths"]
    count = columns["lengths"][n] if "lengths" in columns else columns[names[0]].shape[1]
    rows = [{name: columns[name][n, t] for name in names} for t in range(count)]
    return [{**rows[0], **{name: columns[name][n] for name in columns if name.startswith("state")}}, *rows[1:]]


def write(client, table: str, columns: dict) -> None:
    """One item for each n, some rows to a chunk, with rows before and after that the item leaves out."""
    for n in range(len(next(iter(columns.values())))):
        with client.trajectory_writer(num_keep_alive_refs=50) as writer:
            for row in [*rows_of(columns, n)[-1:], *rows_of(columns, n), *rows_of(columns, n)[-1:]]:
                writer.append(row)
            trajectory = {
                name: writer.history[name][1] if name.startswith("state") else writer.history[name][1:-1]
                for name in columns
                if name != "lengths"
            }
            writer.create_item(table, float(n + 1), trajectory)
            writer.flush()


def write_legacy(client, table: str, columns: dict) -> None:
    """One item for each n; all columns in the same chunks."""
    for n in range(len(next(iter(columns.values())))):
        rows = rows_of(columns, n)
        with client.writer(max_sequence_length=len(rows), delta_encoded=True, chunk_length=2) as writer:
            for row in rows:
                writer.append([row[name] for name in sorted(row)])
            writer.create_item(table, len(rows), float(n + 1))


def read(client, table: str, file: str) -> None:
    """In the order in which they are sampled."""
    count = client.server_info()[table].current_size
    samples = [sample.data for sample in client.sample(table, count, emit_timesteps=False)]
    columns = list(zip(*samples, strict=True))
    lengths = next((list(map(len, column)) for column in columns if len({part.shape for part in column}) > 1), None)
    ragged = {} if lengths is None else {"lengths": lengths}

    def join(column):
        return np.stack(column) if len({part.shape for part in column}) == 1 else np.concatenate(column)

    np.savez(file, **{f"column{i:02}": join(column) for i, column in enumerate(columns)}, **ragged)


if __name__ == "__main__":
    mode, address, table, file = sys.argv[1:]
    client = reverb.Client(address)
    if mode == "read":
        read(client, table, file)
    else:
        with np.load(file) as columns:
            {"write": write, "legacy": write_legacy}[mode](client, table, dict(sorted(columns.items())))
