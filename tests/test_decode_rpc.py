"""The decode server's gRPC services on a real engine: our own, JetStream's, and what they do when things go wrong."""

import itertools
import threading

import grpc
import numpy as np
import pytest
from decode_serving import LONG, MIXED, STEPS, TOKENIZER, Serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_harness import wait_until

from seedx.inference import decode_pb2 as pb
from seedx.inference.decode_client import gather
from seedx.inference.decode_rpc import RETRY_KEY
from seedx.inference.decode_server import MAX_MESSAGE_BYTES
from seedx.inference.requests import QueueFullError, Request
from seedx.inference.scheduler import Limits
from seedx.security import Access

PROMPT = "abcab"
IDS = [*PROMPT.encode()]
BOS = [TOKENIZER.bos_id]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    with Serving(tmp_path_factory.mktemp("serving")) as serving:
        yield serving


def call_raw(serving, path, message, timeout_s=60):
    """Messages of a streaming call, as bytes."""
    with grpc.insecure_channel(serving.server.address) as channel:
        return list(channel.unary_stream(path)(message, timeout=timeout_s))


def refusal(serving, path, message, timeout_s=60):
    with pytest.raises(grpc.RpcError) as caught:
        call_raw(serving, path, message, timeout_s)
    return caught.value


def is_live(serving):
    with grpc.insecure_channel(serving.server.address) as channel:
        reply = channel.unary_unary("/jetstream_proto.Orchestrator/HealthCheck")(b"", timeout=60)
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status
    return reply == b"\x08\x01", status == health_pb2.HealthCheckResponse.SERVING


def test_everything_that_the_scheduler_tells_comes_across(serving):
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 2**40 + 3, "num_samples": 3}
    tokens = pb.GenerateRequest.Tokens(ids=IDS)
    with serving.generate(tokens=tokens, max_tokens=20, **options) as replies:
        completions = gather(replies, 3)
    for got, want in zip(completions, serving.expected(IDS, 20, **options), strict=True):
        assert got.tokens == want.tokens.tolist()
        assert got.versions == [0] * len(got.tokens)
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        np.testing.assert_array_equal(np.float32(got.logprobs), want.logprobs)
        np.testing.assert_array_equal(np.float32(got.raw_logprobs), want.raw_logprobs)
    assert any(a < b for a, b in zip(completions[0].raw_logprobs, completions[0].logprobs, strict=True))


def test_text_begins_with_one_bos_and_tokens_are_taken_as_they_are(serving):
    for prompt in ({"text": PROMPT}, {"text": f"<|bos|>{PROMPT}"}):
        with serving.generate(**prompt, max_tokens=8, temperature=0.0) as replies:
            assert gather(replies, 1)[0].tokens == serving.expected(BOS + IDS, 8, temperature=0.0)[0].tokens.tolist()


def test_jetstream_messages_byte_for_byte(serving):
    # priority = 5, max_tokens = 6, token_content { token_ids: 97, 98 }, by the field numbers of google-jetstream 0.2.2
    replies = call_raw(serving, "/jetstream_proto.Orchestrator/Decode", b"\x18\x05\x20\x06\x32\x04\x0a\x02ab")
    tokens = []
    for reply in replies:
        # stream_content = 3 { samples = 1 { token_ids = 2, packed } }
        assert reply[0] == 0x1A
        assert reply[2] == 0x0A
        assert reply[4] == 0x12
        tokens += _varints(reply[6:])
    assert tokens == serving.expected(b"ab", 6, temperature=0.0)[0].tokens.tolist()


def _varints(data):
    numbers, shift, value = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            shift, value = 0, 0
    return numbers


def test_jetstream_text_gets_one_bos_and_comes_back_as_text(serving):
    request = pb.JetStreamRequest(text_content={"text": PROMPT}, max_tokens=12)
    messages = call_raw(serving, "/jetstream_proto.Orchestrator/Decode", request.SerializeToString())
    samples = [sample for m in messages for sample in pb.JetStreamReply.FromString(m).stream_content.samples]
    (want,) = serving.expected(BOS + IDS, 12, temperature=0.0)
    assert "".join(sample.text for sample in samples) == want.text
    assert [token for sample in samples for token in sample.token_ids] == want.tokens.tolist()


def test_a_live_server_says_so(serving):
    wait_until(lambda: all(is_live(serving)))
    assert is_live(serving) == (True, True)


def test_characters_split_over_tokens_come_whole(serving):
    wholes, halves = "", 0
    for seed in range(6):
        with serving.generate(text=PROMPT, max_tokens=40, seed=seed, **MIXED) as replies:
            texts, tokens = zip(*((reply.text, list(reply.tokens)) for reply in replies), strict=True)
        whole = TOKENIZER.decode([token for some in tokens for token in some])
        assert "".join(texts) == whole
        wholes += whole
        # So that the first half of a character was held back, and came with the second.
        halves += sum(some[-1] % 4 == 2 and following[0] % 4 == 3 for some, following in itertools.pairwise(tokens))
    assert "é" in wholes
    assert halves


@pytest.mark.parametrize("length", [2, 3, 5])
def test_stop_texts_across_tokens(serving, length):
    (free,) = serving.expected(BOS + IDS, 40, seed=1, **MIXED)
    stop = free.text[11 : 11 + length]
    with serving.generate(text=PROMPT, max_tokens=40, seed=1, stop=["never", stop], **MIXED) as replies:
        (completion,) = gather(replies, 1)
    assert completion.text == free.text[: free.text.index(stop)]
    assert completion.finish_reason == "stop"
    assert len(completion.tokens) < len(free.tokens)


BAD = [
    ({"text": "a" * 100}, "prompt"),
    ({"tokens": pb.GenerateRequest.Tokens()}, "prompt"),
    ({}, "prompt"),
    ({"tokens": pb.GenerateRequest.Tokens(ids=[97, 260])}, "prompt"),
    ({"tokens": pb.GenerateRequest.Tokens(ids=[-1])}, "prompt"),
    ({"text": "a", "max_tokens": 0}, "max_tokens"),
    ({"text": "a", "max_tokens": -5}, "max_tokens"),
    ({"text": "a", "temperature": -1.0}, "temperature"),
    ({"text": "a", "temperature": float("nan")}, "temperature"),
    ({"text": "a", "top_k": -1}, "top_k"),
    ({"text": "a", "top_p": 0.0}, "top_p"),
    ({"text": "a", "num_samples": 0}, "num_samples"),
    ({"text": "a", "num_samples": 2**31 - 1}, "num_samples"),
    ({"text": "a", "stop": [""]}, "stop"),
    ({"text": "a", "stop_tokens": [9999]}, "stop_tokens"),
    ({"text": "a", "on_swap": 7}, "on_swap"),
]


@pytest.mark.parametrize(("fields", "named"), BAD)
def test_a_wrong_field_is_named(serving, fields, named):
    with pytest.raises(grpc.RpcError) as caught, serving.generate(**{"max_tokens": 4, **fields}) as replies:
        gather(replies, 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(named)


def test_a_huge_max_tokens_ends_with_the_context(serving):
    with serving.generate(tokens=pb.GenerateRequest.Tokens(ids=IDS), max_tokens=2**31 - 1, temperature=0.0) as replies:
        (completion,) = gather(replies, 1)
    assert (len(IDS) + len(completion.tokens), completion.finish_reason) == (64, "length")


@pytest.mark.parametrize("path", ["/seedx.v1.DecodeService/Generate", "/jetstream_proto.Orchestrator/Decode"])
def test_malformed_messages(serving, path):
    for message in (b"\xff\xff\xff", b"\x0a\x7f", b"\x0a\x02\xc3\x28"):
        error = refusal(serving, path, message)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert refusal(serving, path, b"").details().startswith("prompt is missing")
    assert refusal(serving, path, b"\x00" * (MAX_MESSAGE_BYTES + 1)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("protocol", "path", "no_max_tokens"),
    [
        ("grpc", "/seedx.v1.DecodeService/Generate", pb.GenerateRequest(text="a")),
        (
            "jetstream",
            "/jetstream_proto.Orchestrator/Decode",
            pb.JetStreamRequest(text_content=pb.JetStreamRequest.TextContent(text="a")),
        ),
    ],
)
def test_refused_requests_are_counted_once(serving, protocol, path, no_max_tokens):
    name = f'seedx_decode_requests_total{{outcome="invalid",protocol="{protocol}"}}'
    before = serving.figure(name)
    # No message at all, no prompt, no tokens: what parsing, reading and the scheduler refuse.
    for number, message in enumerate((b"\xff\xff\xff", b"", no_max_tokens.SerializeToString()), 1):
        refusal(serving, path, message)
        assert serving.figure(name) == before + number


def test_a_client_that_goes_away_frees_its_slots_within_a_step(serving):
    serving.gate.close_after(8)
    with serving.generate(text="a", max_tokens=LONG, num_samples=2, temperature=0.0) as replies:
        next(iter(replies))
        wait_until(lambda: serving.gate.closed)
    before = serving.figure("seedx_decode_tokens")
    wait_until(lambda: serving.service.num_open == 0)
    serving.gate.open()
    assert len(serving.expected(IDS, 4, temperature=0.0)[0].tokens) == 4
    wait_until(lambda: serving.scheduler._slots.live == 0)
    # Of each sample: a dispatch that was not delivered yet, and one that waited at the gate.
    assert serving.figure("seedx_decode_tokens") - before <= 2 * 2 * STEPS + 4
    assert serving.figure('seedx_decode_requests_total{outcome="cancelled",protocol="grpc"}') >= 1


def test_the_clients_deadline_counts(serving):
    with serving.gate, serving.generate(timeout_s=0.3, text="a", max_tokens=LONG) as replies:
        with pytest.raises(grpc.RpcError) as caught:
            gather(replies, 1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: serving.service.num_open == 0)
    assert len(serving.expected(IDS, 4, temperature=0.0)[0].tokens) == 4


def test_a_full_queue_says_when_to_come_again(tmp_path):
    with Serving(tmp_path, limits=Limits(max_waiting=2)) as serving:
        with serving.gate:
            taken = [serving.scheduler.submit(Request((97,), 4, num_samples=2))]
            wait_until(lambda: serving.gate.waiting)  # the scheduler is stopped, whatever it has placed
            with pytest.raises(QueueFullError):
                taken += [serving.scheduler.submit(Request((97,), 4, num_samples=2)) for _ in range(9)]
            with pytest.raises(grpc.RpcError) as caught, serving.generate(text="a", max_tokens=4) as refused:
                gather(refused, 1)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            (retry,) = [value for key, value in caught.value.trailing_metadata() if key == RETRY_KEY]
            assert int(retry) > 0
            status, headers, body = serving.http("POST", "/v1/completions", {"prompt": "a"})
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(headers["Retry-After"]) > 0
        assert [len(handle.result(60)) for handle in taken] == [2] * len(taken)


def test_draining_lets_requests_finish_and_takes_no_more(tmp_path):
    with Serving(tmp_path) as serving:
        serving.gate.__enter__()
        with serving.generate(text="a", max_tokens=LONG, temperature=0.0) as replies:
            wait_until(lambda: serving.service.num_open == 1)
            stopping = threading.Thread(target=serving.server.stop, args=(60.0,))
            stopping.start()
            wait_until(lambda: is_live(serving) == (False, False))
            with pytest.raises(grpc.RpcError) as caught, serving.generate(text="a", max_tokens=4) as refused:
                gather(refused, 1)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert serving.http("POST", "/v1/completions", {"prompt": "a"})[0] == 503
            assert serving.http("GET", "/healthz")[0] == 503
            serving.gate.__exit__()
            (completion,) = gather(replies, 1)
        assert completion.finish_reason == "length"
        stopping.join(60)
        assert not stopping.is_alive()


def test_what_outlasts_the_drain_is_ended(tmp_path):
    with Serving(tmp_path) as serving, serving.gate, serving.generate(text="a", max_tokens=LONG) as replies:
        wait_until(lambda: serving.service.num_open == 1)
        serving.server.stop(0.1)
        with pytest.raises(grpc.RpcError) as caught:
            gather(replies, 1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_dead_scheduler_is_not_live_and_answers_nobody_for_ever(tmp_path):
    with Serving(tmp_path) as serving:
        serving.gate.close_after(1)
        with serving.generate(text="a", max_tokens=LONG) as replies:
            wait_until(lambda: serving.gate.closed)
            serving.gate.error = MemoryError("the device is full")
            serving.gate.open()
            wait_until(lambda: serving.crew.failure is not None)
            serving.service.fail(serving.crew.failure)
            with pytest.raises(grpc.RpcError) as caught:
                gather(replies, 1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: is_live(serving) == (False, False))
        assert "failed" in refusal(serving, "/seedx.v1.DecodeService/Generate", b"\x0a\x01a").details()


def test_a_wrong_token(tmp_path):
    for name, content in (("right", "open sesame"), ("wrong", "open sesam")):
        (tmp_path / name).write_text(content)
    right, wrong = (Access(token_file=str(tmp_path / name)) for name in ("right", "wrong"))
    with Serving(tmp_path, access=right) as serving:
        for access in (wrong, Access()):
            with (
                pytest.raises(grpc.RpcError) as caught,
                serving.generate(access=access, text="a", max_tokens=4) as refused,
            ):
                gather(refused, 1)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(serving.server.address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/jetstream_proto.Orchestrator/HealthCheck")(b"", timeout=30)
        with serving.generate(text="a", max_tokens=4) as replies:
            assert len(gather(replies, 1)[0].tokens) == 4
        for given in ("Bearer open sesam", "open sesame", "Bearer \xff"):
            assert serving.http("POST", "/v1/completions", {"prompt": "a"}, Authorization=given)[0] == 401
        assert serving.http("POST", "/v1/completions", {"prompt": "a"}, Authorization="Bearer open sesame")[0] == 200
        assert serving.http("GET", "/metrics")[0] == 401
        text = serving.http("GET", "/metrics", Authorization="Bearer open sesame")[2]
        for protocol, count in (("grpc", 2.0), ("completions", 3.0), ("jetstream", None)):
            line = f'seedx_decode_requests_total{{outcome="unauthenticated",protocol="{protocol}"}}'
            assert (f"{line} {count}" in text) == (line in text) == (count is not None)
        assert serving.http("GET", "/healthz")[0] == 200
