"""An asyncio loop on a thread of its own."""

import asyncio

import pytest

from seedx.loop_thread import LoopThread

DEADLINE_S = 60


def test_what_is_left_at_the_end_is_cancelled_and_not_dropped():
    """gRPC leaves handlers of calls that it has ended; dropped, they complain whenever the collector finds them."""
    ended, failures, left = [], [], []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def serve():
        left.append(asyncio.create_task(waits()))
        await asyncio.sleep(0)
        thread.ready()

    thread = LoopThread("loop", serve, failures.append)
    thread.start()
    thread.join(DEADLINE_S)
    assert (ended, failures) == (["cancelled"], [])
    assert left[0].cancelled()
    assert thread.loop.is_closed()


def test_a_failure_is_raised_by_start_or_told_afterwards():
    failures = []

    async def at_once():
        raise OSError("no port")

    async def later():
        thread.ready()
        raise OSError("no network")

    with pytest.raises(OSError, match="no port"):
        LoopThread("loop", at_once, failures.append).start()
    thread = LoopThread("loop", later, failures.append)
    thread.start()
    thread.join(DEADLINE_S)
    assert [str(failure) for failure in failures] == ["no network"]
