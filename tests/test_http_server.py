"""The OpenAI-style API over a real engine."""

import gzip

import pytest
from decode_serving import LONG, MIXED, TOKENIZER, Serving
from server_harness import wait_until

from seedx.inference import decode_client
from seedx.inference.http_server import MAX_BODY_BYTES

PROMPT = "abcab"
TOKENS = TOKENIZER.encode(PROMPT)
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    with Serving(tmp_path_factory.mktemp("serving")) as serving:
        yield serving


def test_completions_are_the_schedulers(serving):
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 5}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "n": 2, "logprobs": 0, "user": "me", **options}
    status, _, reply = serving.http("POST", "/v1/completions", body)
    wanted = serving.expected(TOKENS, 12, num_samples=2, **options)
    assert (status, reply["object"], reply["model"]) == (200, "text_completion", "tiny")
    for index, (choice, want) in enumerate(zip(reply["choices"], wanted, strict=True)):
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (index, want.text, want.finish_reason)
        assert choice["logprobs"]["token_logprobs"] == want.raw_logprobs.tolist()
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(want.tokens)
    generated = sum(len(want.tokens) for want in wanted)
    assert reply["usage"] == {
        "prompt_tokens": len(TOKENS),
        "completion_tokens": generated,
        "total_tokens": len(TOKENS) + generated,
    }


def test_many_prompts_in_one_request(serving):
    body = {"prompt": [PROMPT, "ba"], "max_tokens": 6, "n": 2, "temperature": 0}
    choices = serving.http("POST", "/v1/completions", body)[2]["choices"]
    want = [serving.expected(TOKENIZER.encode(p), 6, temperature=0.0)[0].text for p in (PROMPT, "ba")]
    assert [choice["text"] for choice in choices] == [want[0], want[0], want[1], want[1]]
    one = serving.http("POST", "/v1/completions", {**body, "prompt": TOKENIZER.encode("ba"), "n": 1})[2]
    assert [choice["text"] for choice in one["choices"]] == want[1:]


def test_a_stream_has_the_same_text_and_ends_with_done(serving):
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "stream_options": {"include_usage": True}, **MIXED}
    *events, usage, done = serving.events("/v1/completions", body)
    (want,) = serving.expected(TOKENS, 40, seed=3, **MIXED)
    assert "".join(event["choices"][0]["text"] for event in events) == want.text
    *before, last = (event["choices"][0]["finish_reason"] for event in events)
    assert (set(before) <= {None}, last) == (True, want.finish_reason)
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], len(want.tokens), "[DONE]")


def test_a_chat_goes_through_the_template(serving):
    body = {"messages": CHAT, "max_completion_tokens": 8, "temperature": 0, "logprobs": True}
    reply = serving.http("POST", "/v1/chat/completions", body)[2]
    prompt = TOKENIZER.encode("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
    (want,) = serving.expected(prompt, 8, temperature=0.0)
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    shown = reply["choices"][0]["logprobs"]["content"]
    assert [bytes(token["bytes"]) for token in shown] == [*map(TOKENIZER.token_bytes, want.tokens.tolist())]
    events = serving.events("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == want.text
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}]
    again = serving.http("POST", "/v1/chat/completions", {**body, "messages": parts})[2]
    assert again["choices"][0]["message"] == reply["choices"][0]["message"]


def test_without_max_tokens_a_chat_goes_to_the_end_of_the_context(serving):
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0}
    reply = serving.http("POST", "/v1/chat/completions", body)[2]
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["total_tokens"]) == ("length", 64)


def test_the_greatest_seed(serving):
    body = {"prompt": PROMPT, "max_tokens": 2, "seed": 2**64 - 1}
    assert serving.http("POST", "/v1/completions", body)[0] == 200


def test_stop_is_a_text_or_several(serving):
    (free,) = serving.expected(TOKENS, 40, seed=1, **MIXED)
    stop = free.text[11:14]
    for given in (stop, ["never", stop]):
        body = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "stop": given, **MIXED}
        (choice,) = serving.http("POST", "/v1/completions", body)[2]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (free.text[: free.text.index(stop)], "stop")


def test_models(serving):
    (model,) = serving.http("GET", "/v1/models")[2]["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert serving.http("GET", "/v1/models/tiny")[2] == model
    assert serving.http("GET", "/v1/models/huge")[0] == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, None),  # a BOS alone: allowed
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "a" * 100}, "prompt"),
        ({"prompt": [97, 260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**40}, None),  # the context ends it
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10**9}, "n"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": 1}, "stop"),
        ({"prompt": "a", "logprobs": 2}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "presence_penalty": 0.0, "echo": False, "user": "me", "suffix": None}, None),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_field_is_named(serving, body, param):
    status, _, reply = serving.http("POST", "/v1/completions", body)
    if param is None:
        assert status == 200, reply
    else:
        assert (status, reply["error"]["param"], reply["error"]["type"]) == (400, param, "invalid_request_error"), reply


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [1],
        [{"role": "user"}],
        [{"role": "king", "content": "a"}],
        [{"role": "user", "content": [1]}],
    ],
)
def test_wrong_messages(serving, messages):
    status, _, reply = serving.http("POST", "/v1/chat/completions", {"messages": messages})
    assert (status, reply["error"]["param"]) == (400, "messages"), reply


def test_malformed_bodies(serving):
    for body in (b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}', b"[" * 100_000):
        status, _, reply = serving.http("POST", "/v1/completions", body)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), (body[:20], reply)
    assert serving.http("POST", "/v1/completions", b" " * (MAX_BODY_BYTES + 1))[0] == 413
    whole = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    assert serving.http("POST", "/v1/completions", whole, Content_Encoding="gzip")[0] == 200
    for body in (b'{"prompt": "a"}', whole[:20]):
        status, _, reply = serving.http("POST", "/v1/completions", body, Content_Encoding="gzip")
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply


def test_refused_requests_are_counted_once(serving):
    name = 'seedx_decode_requests_total{outcome="invalid",protocol="completions"}'
    serving.http("POST", "/v1/completions", b"{")
    before = serving.figure(name)
    bad = (b"{", b" " * (MAX_BODY_BYTES + 1), b'{"prompt": 1.5}', b'{"prompt": "a", "nonsense": 1}')
    for body in (*bad, b'{"prompt": "a", "model": "huge"}', b'{"prompt": "a", "temperature": -1}'):
        assert serving.http("POST", "/v1/completions", body)[0] >= 400
    assert serving.figure(name) == before + len(bad) + 2


def test_statuses_of_other_mistakes(serving):
    assert serving.http("POST", "/v1/completions", {"prompt": "a", "model": "huge"})[2]["error"]["code"] == (
        "model_not_found"
    )
    assert serving.http("GET", "/v1/completions")[0] == 405
    assert serving.http("GET", "/nowhere")[0] == 404


def test_a_grpc_client_of_the_http_port_is_told_and_logs_nothing(serving, capsys, caplog):
    assert decode_client.main(["decode", "--server", serving.server.http_address, "--prompt", "a"]) == 2
    assert "may be its HTTP port" in capsys.readouterr().err
    assert not caplog.records


def test_pages_in_a_browser_are_kept_out(serving):
    body = {"prompt": "a", "max_tokens": 2}
    assert serving.http("POST", "/v1/completions", body, Host="evil.example:80")[0] == 403
    assert serving.http("GET", "/v1/models", Host="evil.example")[0] == 403
    for host in ("localhost", "LOCALHOST", "localhost:9001", "127.0.0.1:1", "[::1]:9001", "[::1]"):
        assert serving.http("GET", "/v1/models", Host=host)[0] == 200
    assert serving.http("POST", "/v1/completions", body, Content_Type="text/plain")[0] == 415
    status, headers, _ = serving.http("OPTIONS", "/v1/completions", Origin="http://evil.example")
    assert status == 405
    assert "Access-Control-Allow-Origin" not in headers


def test_a_reader_that_goes_away_frees_its_slot(serving):
    body = {"prompt": "a", "max_tokens": LONG, "stream": True, "temperature": 0}
    with serving.gate:
        with serving.open_http("POST", "/v1/completions", body) as response:
            assert response.status == 200
            wait_until(lambda: serving.service.num_open == 1)
        wait_until(lambda: serving.service.num_open == 0)
    assert len(serving.expected(TOKENS, 4, temperature=0.0)[0].tokens) == 4


def test_metrics_and_health(serving):
    before = serving.figure('seedx_decode_completion_tokens_total{protocol="completions"}')
    serving.http("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 7, "temperature": 0})
    assert serving.figure('seedx_decode_completion_tokens_total{protocol="completions"}') == before + 7
    assert serving.figure('seedx_decode_requests_total{outcome="length",protocol="completions"}') >= 1
    assert serving.figure("seedx_decode_first_token_seconds_count") >= 1
    assert serving.figure("seedx_decode_tokens") >= 7
    assert serving.figure("seedx_decode_swaps") == 0
    assert serving.http("GET", "/healthz")[::2] == (200, "ok\n")
