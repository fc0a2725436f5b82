"""GRPO on the built-in string tasks, with a tiny model that reads bytes.

Expected: from about 0.3 exact on held-out prompts after the warm start to at least 0.9.
Hardware: a laptop CPU with 2 cores. Wall time: about 4 minutes.
Command: python launch/local.py --agent grpo
Settings: found on this task; groups of 8 completions of 16 prompts.
"""

from seedx.config import MetricsConfig
from seedx.grpo_config import GrpoConfig, TextLearnerConfig, WarmStartConfig
from seedx.llm_config import LlmConfig


def config() -> LlmConfig:
    """The recipe."""
    return LlmConfig(
        agent="grpo",
        task="reverse",
        model="tiny",
        stop_at_reward=0.93,
        grpo=GrpoConfig(group_size=8, dynamic_sampling=True),
        learner=TextLearnerConfig(batch_size=16, microbatches=1, learning_rate=1e-4),
        warm_start=WarmStartConfig(reward=0.3),
        metrics=MetricsConfig(return_window=2048),
    )
