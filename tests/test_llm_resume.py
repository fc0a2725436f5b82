"""What comes back at a resume of an LLM run, of one of earlier versions too."""

import jax
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import CONFIG, make_params

from seedx import sharding
from seedx.checkpoint import Checkpointer
from seedx.checks import ConfigError
from seedx.learner.text_learner import TextState
from seedx.learner.trainable import Trainable
from seedx.llm_config import LlmConfig
from seedx.llm_resume import Progress, resume_llm_run, save_llm_run
from seedx.lora_config import LoraConfig


def state_of(trainable, seed=0):
    params = make_params(seed, CONFIG)
    return TextState(params, *trainable.begin(params), {"count": np.int32(seed)}, 3, 24, 70, 6)


def trainable(**options):
    return Trainable(CONFIG, sharding.serve_mesh(), **options)


@pytest.fixture
def checkpointer(tmp_path):
    opened = Checkpointer(tmp_path)
    yield opened
    opened.close()


def test_what_was_saved_comes_back(checkpointer):
    parts = trainable(reference=True)
    progress = Progress(12.5, [0.5, 1.0], [0.25, float("nan")], {"rates": [0.5]})
    state = state_of(parts)
    save_llm_run(checkpointer, LlmConfig(), parts, state, progress, block=True)
    found, back = resume_llm_run(checkpointer, LlmConfig(), parts, state_of(parts, seed=1))
    assert_bit_equal(found, jax.tree.map(np.asarray, state))
    np.testing.assert_equal(back._asdict(), progress._asdict())


def test_a_run_of_an_earlier_version_goes_on_without_what_it_did_not_know(checkpointer):
    parts = trainable()
    state = state_of(parts)
    config = {"agent": "grpo"}  # of before there were adapters
    metadata = {"config": config, "env_steps": 24, "tokens": 70, "position": 6, "seconds": 9.0, "rewards": [0.5]}
    metadata |= {"updates": 3, "score_before": 0.25}
    checkpointer.save(3, state.params, {"opt_state": state.opt_state}, metadata, block=True)
    found, progress = resume_llm_run(checkpointer, LlmConfig(), parts, state_of(parts, seed=1))
    assert (found.updates, found.position) == (3, 6)
    assert progress == Progress(9.0, [0.5])


def test_adapters_keep_their_scale(checkpointer):
    then, now = (trainable(lora=LoraConfig(rank=2, alpha=alpha)) for alpha in (4.0, 8.0))
    config = LlmConfig(lora=then.lora)
    save_llm_run(checkpointer, config, then, state_of(then), Progress(0.0, []), block=True)
    with pytest.raises(ConfigError, match=r"--lora.alpha \(8\) was 4 when the adapters were trained"):
        resume_llm_run(checkpointer, config, now, state_of(now, seed=1))


def test_another_task_is_refused(checkpointer):
    parts = trainable()
    save_llm_run(checkpointer, LlmConfig(task="sort"), parts, state_of(parts), Progress(0.0, []), block=True)
    with pytest.raises(ConfigError, match="--task reverse cannot go on with a run of sort"):
        resume_llm_run(checkpointer, LlmConfig(), parts, state_of(parts, seed=1))
