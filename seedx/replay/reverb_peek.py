"""Looks at an item of a table that was filled before, so that a run never adds items to a table of another kind.

A server knows no shapes but those of a signature, which most tables have not, so an item has to be sampled. It is not
lost, not even to a queue: whoever looked gives it to its first sample, or puts it back.
"""

from __future__ import annotations

import queue

import grpc

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_client import ReverbClient, is_lost
from seedx.replay.reverb_decoder import Received, complete_samples

_LIMITER_MS = 500
_ANSWER_S = 10.0  # the server itself ends the request long before; if we did, it would take another item
_PUT_BACK_S = 5.0


def peek(client: ReverbClient, table: pb.TableInfo) -> Received | None:
    """Samples one item; None if the table is empty, its rate limiter lets none out, or the server is gone meanwhile.

    Raises:
        grpc.RpcError: the server refused.
    """
    if not table.current_size:
        return None
    request = pb.SampleStreamRequest(table=table.name, num_samples=1)
    request.rate_limiter_timeout.milliseconds = _LIMITER_MS
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    requests.put(request.SerializeToString())
    call = client.sample_stream(iter(requests.get, None), timeout=_ANSWER_S)
    try:
        return next(complete_samples(call), None)
    except grpc.RpcError as error:
        if is_lost(error):  # also what the end of the rate limiter's timeout looks like
            return None
        raise
    finally:
        requests.put(None)


def put_back(client: ReverbClient, table: pb.TableInfo, sample: Received) -> bool:
    """Inserts an item again, with its key and priority, if sampling it took it away; whether the table has it.

    In a queue it is then the last.
    """
    item = sample.info.item
    if not 0 < table.max_times_sampled <= item.times_sampled:
        return True
    item.times_sampled -= 1  # the server takes our word for it, and removes items that reach the limit, none beyond it
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    requests.put(pb.InsertStreamRequest(chunks=sample.chunks.values(), items=[item]).SerializeToString())
    call = client.insert_stream(iter(requests.get, None), timeout=_PUT_BACK_S)
    try:
        return item.key in next(call).keys
    except (grpc.RpcError, StopIteration):
        return False
    finally:
        requests.put(None)
