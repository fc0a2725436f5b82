"""How timesteps and actions lie in a message: raw leaves one after another, read without a copy.

`policy.proto` describes the messages. The two that travel at every step are written and read here by hand, so that the
bytes of a leaf are copied once, from the message into the batch; anything but the one expected form goes through
protobuf's own parser and is judged there. NumPy only: actors import this.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from seedx import specs
from seedx.inference import policy_pb2 as pb
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep

PROTOCOL = 1
HELLO = "/seedx.v1.PolicyServer/Hello"
ACT = "/seedx.v1.PolicyServer/Act"
MAX_MESSAGE_BYTES = 256 * 2**20


class WireError(ValueError):
    """A message that cannot be used; the text names the field, what came and what is expected."""


class Column(NamedTuple):
    """One leaf of a message: its name, spec and bytes of one environment's row."""

    name: str
    spec: ArraySpec
    row_bytes: int


def timestep_columns(spec: EnvSpec) -> list[Column]:
    """The leaves of a timestep in the order in which they travel."""
    scalar = ArraySpec((), "float32")
    named = [("reward", scalar), ("discount", scalar)]
    named += [(f"observation/{path}".rstrip("/"), leaf) for path, leaf in specs.leaves(spec.observation)]
    return [_column(*pair) for pair in [*named, ("step_type", ArraySpec((), "uint8"))]]


def action_columns(spec: EnvSpec) -> list[Column]:
    """The leaves of an action in the order in which they travel."""
    return [_column(f"action/{path}".rstrip("/"), leaf) for path, leaf in specs.leaves(spec.action)]


def timestep_leaves(timestep: TimeStep, observation_leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The leaves of a timestep in the order of `timestep_columns`."""
    return [timestep.reward, timestep.discount, *observation_leaves, timestep.step_type]


class Layout:
    """The byte layout of one kind of message for a group of N environments."""

    def __init__(self, columns: Sequence[Column], num_envs: int) -> None:
        self.columns = list(columns)
        self.num_envs = num_envs
        self.sizes = [column.row_bytes * num_envs for column in columns]
        self.num_bytes = sum(self.sizes)

    def encode(self, field: int, leaves: Sequence[np.ndarray]) -> bytes:
        """A protobuf bytes field that holds the leaves.

        Raises:
            WireError: a leaf has another shape or dtype than the spec says.
        """
        parts: list = [_length_prefix(field, self.num_bytes)]
        for column, leaf in zip(self.columns, leaves, strict=True):
            expected = (self.num_envs, *column.spec.shape)
            if leaf.shape != expected or leaf.dtype != np.dtype(column.spec.dtype):
                raise WireError(
                    f"{column.name} is {leaf.dtype}{list(leaf.shape)}; the spec says "
                    f"{column.spec.dtype}{list(expected)}. Mend the environment or its spec."
                )
            parts.append(np.ascontiguousarray(leaf).data if leaf.size else b"")
        return b"".join(parts)

    def decode_into(self, rows: Sequence[np.ndarray], payloads: Sequence[memoryview]) -> None:
        """Copies the leaves of M payloads, one payload after another, into contiguous leaves `[M * N, ...]`."""
        start = 0
        for leaf, size in zip(rows, self.sizes, strict=True):
            stop, target = start + size, leaf.reshape(-1).view(np.uint8).data
            for i, payload in enumerate(payloads):
                target[i * size : (i + 1) * size] = payload[start:stop]
            start = stop

    def decode(self, payload: memoryview) -> list[np.ndarray]:
        """Read-only views `[N, ...]` of the leaves in a payload of `num_bytes`."""
        views, offset = [], 0
        for column, size in zip(self.columns, self.sizes, strict=True):
            flat = np.frombuffer(payload[offset : offset + size], np.dtype(column.spec.dtype))
            views.append(flat.reshape(self.num_envs, *column.spec.shape))
            offset += size
        return views


class TimestepCodec:
    """Writes and reads the ActRequest that carries a group's rows."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.layout = Layout(timestep_columns(spec), num_envs)
        self._prefix = _length_prefix(2, self.layout.num_bytes)

    def encode(self, timestep: TimeStep, observation_leaves: Sequence[np.ndarray]) -> bytes:
        """The message of one timestep; raises WireError where it differs from the spec."""
        return self.layout.encode(2, timestep_leaves(timestep, observation_leaves))

    def payload(self, message: bytes) -> memoryview:
        """The leaves' bytes, not copied.

        Raises:
            WireError: not a timestep of this group's size.
        """
        start = len(self._prefix)
        if len(message) == start + self.layout.num_bytes and message.startswith(self._prefix):
            return memoryview(message)[start:]
        request = parse_request(message)
        if request.WhichOneof("request") != "timestep":
            raise WireError("request is not a timestep; after the first message of a stream only timesteps may follow.")
        if len(request.timestep) != self.layout.num_bytes:
            raise WireError(
                f"timestep has {len(request.timestep)} bytes; {self.layout.num_envs} environments of this spec "
                f"make {self.layout.num_bytes} ({', '.join(c.name for c in self.layout.columns)})."
            )
        return memoryview(request.timestep)


class ActionCodec:
    """Writes and reads the ActReply that answers a group."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.layout = Layout(action_columns(spec), num_envs)
        self._prefix = _length_prefix(1, self.layout.num_bytes)

    def encode(self, leaves: Sequence[np.ndarray], version: int, first: int = 0) -> bytes:
        """The reply to a group.

        Args:
            leaves: Of the actions of a batch, `[B, ...]`, with the spec's dtypes.
            version: Of the weights that chose them.
            first: The row of the batch where the group's begin.
        """
        last = first + self.layout.num_envs
        return b"".join([self._prefix, *(leaf[first:last].tobytes() for leaf in leaves), _version_field(version)])

    def decode(self, message: bytes) -> tuple[list[np.ndarray], int]:
        """The actions' leaves and the weights version.

        Raises:
            WireError: not a reply for this group.
        """
        try:
            reply = pb.ActReply.FromString(message)
        except DecodeError as error:
            raise WireError(f"the server's reply is not an ActReply: {error}") from error
        if len(reply.action) != self.layout.num_bytes:
            raise WireError(f"action has {len(reply.action)} bytes; this group needs {self.layout.num_bytes}.")
        return self.layout.decode(memoryview(reply.action)), reply.version


def parse_request(message: bytes) -> pb.ActRequest:
    """The ActRequest in a message.

    Raises:
        WireError: the bytes are not one.
    """
    try:
        return pb.ActRequest.FromString(message)
    except DecodeError as error:
        raise WireError(f"request of {len(message)} bytes is not an ActRequest: {error}") from error


def check_rows(columns: Sequence[Column], leaves: Sequence[np.ndarray], starts_episode: np.ndarray) -> str | None:
    """What is wrong with the values of some rows, or None.

    Args:
        columns: Of the timestep.
        leaves: The timestep's leaves `[N, ...]`.
        starts_episode: `[N]` bool, True where a FIRST row must come (the last one was LAST, or there was none).
    """
    for column, leaf in zip(columns, leaves, strict=True):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            row = int(np.argwhere(~np.isfinite(leaf))[0][0])
            value = leaf[row] if leaf.ndim == 1 else "not finite everywhere"
            bound = f"as {leaf.dtype}, which it is cast to: at most {np.finfo(leaf.dtype).max:.1e}"
            return f"{column.name} of environment {row} is {value}; it must be finite ({bound})."
        values = column.spec.num_values
        if values is not None and ((leaf < 0) | (leaf >= values)).any():
            row = int(np.argwhere((leaf < 0) | (leaf >= values))[0][0])
            return f"{column.name} of environment {row} is {leaf[row]}; allowed are 0 to {values - 1}."
    step_type, discount = leaves[-1], leaves[1]
    if (step_type > StepType.LAST).any():
        return f"step_type is {step_type.max()}; allowed are 0 (FIRST), 1 (MID) and 2 (LAST)."
    if ((step_type == StepType.FIRST) != starts_episode).any():
        row = int(np.argmax((step_type == StepType.FIRST) != starts_episode))
        must = "must be FIRST after LAST and at the start" if starts_episode[row] else "may be FIRST only after LAST"
        return f"step_type of environment {row} is {StepType(step_type[row]).name}; it {must}."
    if ((discount < 0) | (discount > 1)).any():
        return f"discount ranges over [{discount.min()}, {discount.max()}]; it must lie in [0, 1]."
    return None


def _column(name: str, spec: ArraySpec) -> Column:
    return Column(name, spec, int(np.prod(spec.shape, dtype=np.int64)) * np.dtype(spec.dtype).itemsize)


def _length_prefix(field: int, num_bytes: int) -> bytes:
    return bytes([field << 3 | 2]) + _varint(num_bytes)


@functools.lru_cache(maxsize=8)
def _version_field(version: int) -> bytes:
    return b"\x10" + _varint(version)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
