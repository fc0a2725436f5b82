"""GRPO on a dataset of reasoning-gym, with SmolLM2-135M-Instruct.

Expected: sums of two or three numbers below ten; held-out reward from about 0.04 to about 0.16 (seed 1, 28 updates).
Hardware: a CPU with 2 cores, 12 GB of memory. Wall time: 18 minutes.
Command: python launch/local.py --agent grpo --config configs/grpo_smollm2.py
Settings: the dataset was found with benchmarks/grpo_scan.py; needs `pip install -e ".[llm,tasks]"`.
"""

from seedx.config import CheckpointConfig, MetricsConfig
from seedx.device_config import MeshConfig
from seedx.grpo_config import GrpoConfig, HeldOutConfig, RolloutConfig, TextLearnerConfig
from seedx.llm_config import LlmConfig

_SETTINGS = 'min_terms=2&max_terms=3&min_digits=1&max_digits=1&operators=["+"]&allow_parentheses=false'


def config() -> LlmConfig:
    """The recipe."""
    return LlmConfig(
        agent="grpo",
        task=f"reasoning_gym:basic_arithmetic?{_SETTINGS}&shots=1&system=Answer.",
        model="smollm2",
        seconds=900,
        mesh=MeshConfig(data=1),  # two would hold twice the weights, and be no faster on two cores
        grpo=GrpoConfig(group_size=8, dynamic_sampling=True),
        rollout=RolloutConfig(max_tokens=8, max_prompt_tokens=64, temperature=0.7),
        learner=TextLearnerConfig(batch_size=8, microbatches=2, learning_rate=2e-5),
        held_out=HeldOutConfig(num_prompts=200, num_samples=4),
        checkpoint=CheckpointConfig(interval_s=600),
        metrics=MetricsConfig(return_window=256),
    )
