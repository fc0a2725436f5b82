"""What an actor says first: who it is, how many environments it steps, and what they look like."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from seedx import specs
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.inference.streams import Refused, Status
from seedx.types import EnvSpec

_MAX_ENVS_PER_GROUP = 2**20


def parse_hello(message: bytes) -> tuple[pb.HelloRequest, EnvSpec]:
    """The request and the spec in it.

    Raises:
        Refused: it is no hello, of another protocol, or says what cannot be.
    """
    try:
        request = pb.HelloRequest.FromString(message)
    except DecodeError as error:
        raise Refused(Status.INVALID_ARGUMENT, f"{len(message)} bytes are no HelloRequest: {error}.") from error
    if request.protocol != wire.PROTOCOL:
        raise Refused(
            Status.FAILED_PRECONDITION,
            f"protocol is {request.protocol}, this server speaks {wire.PROTOCOL}; install one seedx on both sides.",
        )
    if not 1 <= request.groups <= 1024 or not 1 <= request.envs_per_group <= _MAX_ENVS_PER_GROUP:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f"groups ({request.groups}) must be 1 to 1024 and envs_per_group ({request.envs_per_group}) 1 to "
            f"{_MAX_ENVS_PER_GROUP}.",
        )
    try:
        return request, specs.from_json(request.spec_json)
    except ValueError as error:
        raise Refused(Status.INVALID_ARGUMENT, f"spec_json: {error}.") from error
