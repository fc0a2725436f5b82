"""A publisher, or a reader, in a process of its own: `python weights_process.py publish|stall|read|hold ADDRESS`.

Version v of a tree has the value v in all its elements. `publish` publishes the given versions and stays; `read` prints
what it receives; `hold` takes the first chunk of a version and then no more.
"""

import argparse
import sys
import time

import ml_dtypes
import numpy as np

from seedx.security import Access
from seedx.transport import transport_pb2 as pb
from seedx.transport.open import open_publisher, open_reader


def tree_of(version, size):
    """Two tensors, of `size` bytes together and more."""
    return {
        "layer": {"w": np.full(size // 4, version, np.float32)},
        "head": np.full((3, 5), version, ml_dtypes.bfloat16),
    }


def check_whole(weights, size):
    """Raises AssertionError unless all of a version is of that version."""
    wanted = tree_of(weights.version, size)
    assert weights.params.keys() == wanted.keys()
    np.testing.assert_array_equal(weights.params["layer"]["w"], wanted["layer"]["w"])
    np.testing.assert_array_equal(weights.params["head"], wanted["head"])


def fail(error):
    raise error


def publish(flags):
    publisher = open_publisher(flags.address, Access(), fail, delta=flags.delta, checksums=not flags.no_checksums)
    for version in flags.versions:
        publisher.publish(version, tree_of(version, flags.size))
    print("published", flush=True)
    time.sleep(600)


def stall(flags):
    """Publishes the first version, and half of the second one in shared memory."""
    import itertools

    from seedx.transport import slot

    publisher = open_publisher(flags.address, Access(), fail)
    publisher.publish(flags.versions[0], tree_of(flags.versions[0], flags.size))
    open_reader(flags.address, Access()).receive(-1, 60.0)
    pieces = slot.pieces

    def half(encoded):
        yield from itertools.islice(pieces(encoded), flags.size // 2**21)
        print("stalled", flush=True)
        time.sleep(600)

    slot.pieces = half
    publisher.publish(flags.versions[1], tree_of(flags.versions[1], flags.size))
    time.sleep(600)


def read(flags):
    reader, version = open_reader(flags.address, Access(), delta=flags.delta), -1
    while version < flags.versions[-1]:
        weights = reader.receive(version, 60.0)
        check_whole(weights, flags.size)
        version = weights.version
        print("read", version, flush=True)


def hold(flags):
    import grpc

    from seedx.transport.grpc_sink import METHOD, SERVICE
    from seedx.transport.manifest import PROTOCOL

    request = pb.ReceiveRequest(protocol=PROTOCOL, newer_than=-1, wait_s=60).SerializeToString()
    call = grpc.insecure_channel(flags.address).unary_stream(f"/{SERVICE}/{METHOD}")(request)
    next(call), next(call)
    print("holding", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["publish", "stall", "read", "hold"])
    parser.add_argument("address")
    parser.add_argument("--versions", type=int, nargs="+", default=[0])
    parser.add_argument("--size", type=int, default=2**20)
    parser.add_argument("--delta", action="store_true")
    parser.add_argument("--no-checksums", action="store_true")
    flags = parser.parse_args()
    sys.exit(globals()[flags.command](flags))
