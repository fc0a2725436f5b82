"""What a run's engine answers others while it learns: the likeliest tokens of the very version that it names."""

import grpc
import pytest
from processes import Processes
from serving_run import MAX_TOKENS, ServingRun

from seedx.inference import decode_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = tuple(b"tr7=")
UPDATES = 20


def decode(address):
    """Tokens by JetStream's protocol, which is greedy and says no version."""
    request = pb.JetStreamRequest(max_tokens=MAX_TOKENS)
    request.token_content.token_ids.extend(PROMPT)
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_stream(
            "/jetstream_proto.Orchestrator/Decode",
            pb.JetStreamRequest.SerializeToString,
            pb.JetStreamReply.FromString,
        )
        replies = list(method(request, timeout=60))
    return [token for reply in replies for token in reply.stream_content.samples[0].token_ids]


def test_greedy_answers_change_with_the_version_and_equal_a_full_forward_pass_of_its_checkpoint(tmp_path):
    with Processes(tmp_path) as processes:
        run, answers = ServingRun(processes), []
        for updates in (0, UPDATES // 2, UPDATES):
            run.learn(updates)
            while not answers or answers[-1].versions[-1] < updates:  # those on the way, too
                answers.append(run.process.until(lambda: run.generate(PROMPT), "an answer"))
            tokens = decode(run.address)
            answers.append(run.generate(PROMPT))
            assert set(answers[-1].versions) == {updates}  # so it was the version of JetStream's answer
            said = answers[-1].tokens
            assert tokens == said[: len(said) - (answers[-1].finish_reason == "stop")]
        run.process.send(15)
        assert run.process.wait() == 143, run.process.said
        assert run.newest_saved() == UPDATES
    versions = [version for answer in answers for version in answer.versions]
    assert versions == sorted(versions)
    checked = {}
    for answer in answers:
        if len(set(answer.versions)) == 1 and run.has_saved(version := answer.versions[0]) and version not in checked:
            run.check(version, PROMPT, answer.tokens)
            checked[version] = answer.tokens
    assert {0, UPDATES} <= set(checked)
    assert checked[0] != checked[UPDATES]
    with pytest.raises(AssertionError, match="not the likeliest"):
        run.check(UPDATES, PROMPT, checked[0])
