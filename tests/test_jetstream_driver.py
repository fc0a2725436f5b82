"""google-jetstream's own driver, and ours over it, on our engine."""

import asyncio

import grpc
import jax
import numpy as np
import pytest
from decode_harness import make_engine, make_params, near_misses, random_prompts
from jax.sharding import AxisType, Mesh
from jetstream_harness import (
    DecodeRequest,
    Letters,
    SteppedEngine,
    TokenContent,
    decode,
    decode_all,
    make_jetstream,
    stock_driver,
)
from processes import until
from server_harness import wait_until

from seedx.inference.jetstream_driver import JetStreamDriver, JetStreamService
from seedx.inference.jetstream_engine import JetStreamEngine
from seedx.inference.jetstream_shims import jetstream_pb2, jetstream_pb2_grpc
from seedx.threads import Crew

pytestmark = pytest.mark.external

BOS = Letters.bos_id


@pytest.fixture(scope="module")
def params():
    return make_params(0)


@pytest.fixture
def engine():
    return make_jetstream()


def check(params, prompts, answers, max_tokens=8):
    """Every sample of every answer is what full forward passes give."""
    misses = 0
    for prompt, samples in zip(prompts, answers, strict=True):
        for tokens in samples:
            assert len(tokens) == min(max_tokens, 64 - len(prompt))
            misses += near_misses(params, prompt, np.array(tokens))
    assert misses <= 1


def test_jetstreams_own_driver_interleaved(engine, params):
    """More prompts than slots, of all lengths; this driver puts a BOS before each."""
    prompts = random_prompts(12, 1, 50, seed=1)
    check(params, [(BOS, *prompt) for prompt in prompts], decode_all(stock_driver(engine), prompts, 8))
    assert engine.engine.compilations == 0


def test_jetstreams_own_driver_with_two_samples_a_slot(params):
    pairs = make_jetstream(samples_per_slot=2)
    prompts = random_prompts(7, 1, 40, seed=2)
    answers = decode_all(stock_driver(pairs), prompts, 8)
    assert all(len(samples) == 2 for samples in answers)
    check(params, [(BOS, *prompt) for prompt in prompts], answers)


def test_jetstreams_own_driver_disaggregated(params):
    """Prompts are computed on one device, and generated on two others over which key heads are spread."""
    places = []

    class Watched(JetStreamEngine):
        def insert(self, prefix, decode_state, slot):
            places.append(jax.tree.map(lambda leaf: leaf.sharding, prefix.rows))
            return super().insert(prefix, decode_state, slot)

    grid = np.array(jax.devices()[2:4]).reshape(1, 1, 2)
    mesh = Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    prefilling, generating = make_jetstream(), make_jetstream(Watched, engine=make_engine(steps=1, mesh=mesh))
    prompts = [*random_prompts(6, 2, 40, seed=3), (7,)]
    answers = decode_all(stock_driver(prefilling, generating), prompts, 6)
    check(params, [(BOS, *prompt) for prompt in prompts], answers, 6)
    assert len(places) == len(prompts)
    wanted = generating.get_prefix_destination_sharding().rows
    assert jax.tree.leaves(wanted)[0].device_set == set(grid.ravel().tolist())
    assert all(place == wanted for place in places)


def test_our_driver_takes_tokens_as_they_are(engine, params):
    prompts = random_prompts(8, 1, 60, seed=4)
    check(params, prompts, decode_all(JetStreamDriver(Crew(), [engine]), prompts, 8))
    answers = decode_all(JetStreamDriver(Crew(), [engine]), ["HELLO"], 8)
    check(params, [Letters().encode("HELLO")], answers)
    assert engine.engine.compilations == 0


def test_a_swap_under_the_driver(engine, params):
    """A stream goes on without a gap; what is asked for afterwards is answered with the new weights alone."""
    after, driver = make_params(1), JetStreamDriver(Crew(), [engine])
    prompt, later = random_prompts(2, 5, 10, seed=8)

    async def run():
        service = JetStreamService(driver)
        try:
            stream = await decode(service, prompt, 40, lambda n: n == 5 and driver.publish(1, after))
            return stream, await decode(service, later, 8)
        finally:
            await asyncio.to_thread(driver.stop)

    (stream,), answer = asyncio.run(run())
    assert len(stream) == 40
    assert near_misses(params, prompt, np.array(stream[:5])) == 0
    check(after, [later], [answer])


def test_a_client_that_left_frees_its_slot():
    engine = make_jetstream(SteppedEngine)
    driver = JetStreamDriver(Crew(), [engine])

    async def run():
        server = grpc.aio.server()
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(JetStreamService(driver), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(
                DecodeRequest(max_tokens=50, token_content=TokenContent(token_ids=[5, 6]))
            )
            engine.permits.release()
            assert (await call.read()).stream_content.samples[0].token_ids
            call.cancel()
            await server.stop(0.0)
        try:
            await asyncio.to_thread(until, freed, "a free slot")
            assert engine.made < 50
        finally:
            engine.permits.release(100)
            await asyncio.to_thread(driver.stop)

    def freed():
        """With the next token the driver notices; how soon it hears of the client is gRPC's affair."""
        engine.permits.release()
        return driver._generate_slots[0].qsize() == 4

    asyncio.run(run())


def test_a_failure_is_told_and_nobody_is_killed():
    engine, crew = make_jetstream(SteppedEngine), Crew()
    engine.error = RuntimeError("the engine broke")
    driver = JetStreamDriver(crew, [engine])

    async def run():
        call = asyncio.create_task(decode(JetStreamService(driver), [5, 6], 5))
        await asyncio.to_thread(wait_until, crew.stop.is_set)
        health = await JetStreamService(driver).HealthCheck(jetstream_pb2.HealthCheckRequest(), None)
        assert not health.is_live
        call.cancel()
        await asyncio.to_thread(driver.stop)

    asyncio.run(run())
    assert "the engine broke" in crew.describe_failure()
