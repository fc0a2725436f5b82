"""Judges behind two decode servers, as processes: both grade, one takes over, none is said; and a run with them."""

import json
import os
import time
from pathlib import Path

import hf_directories
import numpy as np
import parity_cases
import pytest
import serve_processes
from processes import QUICK, Processes, last, until

from seedx import bpe
from seedx.envs.text.judge import Judge, JudgeError
from seedx.envs.text.rewards import RewardPool
from seedx.envs.text.task import Prompt
from seedx.metrics import Metrics
from seedx.networks.hf_config import from_hf
from seedx.networks.hf_files import stored_names
from seedx.reward_config import RewardConfig
from seedx.threads import Crew

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

S = 100.0  # bounds hanging alone
PROMPT = Prompt("2+2=", answer="4")
TASK = "text_tasks:bytes_"


def write_grader(path, grade):
    """A model that answers everything with a digit and a line end; returns the directory."""
    raw = parity_cases.CASES["llama"] | {"vocab_size": 256, "max_position_embeddings": 1024}
    pieces = stored_names(from_hf(raw))
    tensors = {name: np.full(piece.shape, "norm" in name, np.float32) for name, piece in pieces.items()}
    path.mkdir()
    hf_directories.write_byte_tokenizer(path)
    hf_directories.write_directory(path, raw, tensors)
    digit, end = bpe.from_json(path).encode(f"{grade}\n", add_bos=False)
    # The residual stream says whether the token is the digit; the output makes the next one of that.
    embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[:, 0], embedding[digit, :2] = 1.0, (0.0, 1.0)
    output[digit, 0] = output[end, 1] = 1.0
    hf_directories.write_directory(path, raw, tensors)
    return path


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def judges(processes, tmp_path):
    """Two servers, which give 7 and 3, and their addresses."""
    flags = ("--context", "1024", "--max-concurrent", "4")
    started = [
        serve_processes.start(processes, "--model", str(write_grader(tmp_path / str(grade), grade)), *flags)
        for grade in (7, 3)
    ]
    return [(server, serve_processes.addresses(server)[0]) for server in started]


def test_both_judge_one_takes_over_and_none_is_said_in_time(judges, tmp_path, monkeypatch, capsys):
    (seven, a), (three, b) = judges
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (Path(__file__).parent.parent, Path(__file__).parent))))
    judge, completions = Judge([a, b], timeout_s=S), [str(n) for n in range(30)]
    assert {judge(PROMPT, text).value for text in completions} == {0.7, 0.3}
    assert judge(PROMPT, "x").version == 0

    config = RewardConfig(timeout_s=2 * S, retries=0)  # with its own limit of memory and 64 at the same time
    pool = RewardPool(f"{TASK}?reward=judge:{a},{b}&timeout_s={S:g}", config, metrics := Metrics(), crew := Crew())
    try:
        futures = [pool.submit(PROMPT, f"completion {n}") for n in range(400)]
        until(lambda: sum(future.done() for future in futures) >= 50, "the first grades")
        seven.popen.kill()
        seven.wait()
        scores = [future.result(S) for future in futures]
        assert {score["judge"] for score in scores} == {0.7, 0.3}
        assert {score["judge_version"] for score in scores} == {0}
        later = [pool.submit(PROMPT, text).result(S)["judge"] for text in completions]
        assert later == [0.3] * 30
        three.popen.kill()
        three.wait()
        assert pool.submit(PROMPT, "4").result(S) is None
        assert crew.failure is None
        assert metrics.snapshot()["reward/unscored"] == 1
    finally:
        pool.close()
    assert "JudgeError: no judge gave a verdict within 100 s" in (said := capsys.readouterr().out)
    assert f"{a}: UNAVAILABLE" in said
    started = time.monotonic()
    with pytest.raises(JudgeError, match="start it, or correct the task's reward"):
        judge(PROMPT, "4")
    assert time.monotonic() - started < S


def test_a_run_is_rewarded_by_judges_and_shows_their_versions(processes, judges, tmp_path):
    lines = [{"prompt": f"{n}=", "answer": ""} for n in range(8)]
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, lines)))
    addresses = ",".join(address for _, address in judges)
    flags = (
        *("--agent", "grpo", "--task", f"jsonl:my.jsonl?reward=judge:{addresses}&weight=2&timeout_s=50"),
        *("--reward.timeout-s", "100", "--rollout.max-tokens", "8", "--held-out.num-prompts", "0"),
        *("--learner.batch-size", "2", "--grpo.group-size", "4", "--grpo.no-dynamic-sampling", "--steps", "32"),
        *("--metrics.no-tensorboard", "--metrics.interval-s", "0.2", "--run-dir", str(tmp_path / "run")),
    )
    run = processes.launch("local.py", *flags, env=QUICK)
    assert run.wait(300) == 0, run.said
    samples = [
        sample
        for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
        for sample in json.loads(line)["completions"]
    ]
    assert samples
    for sample in samples:
        assert sample["scores"]["judge"] in (0.7, 0.3)
        assert sample["scores"]["judge_version"] == 0
        assert sample["reward"] == 2 * sample["scores"]["judge"]
    assert 0.3 <= last(tmp_path / "run", "reward/judge") <= 0.7
    assert last(tmp_path / "run", "reward/unscored") == 0
