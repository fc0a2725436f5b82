"""IMPALA on an Atari game with the settings reported for its paper (1802.01561), shallow network, one game a run.

Expected: no score is claimed; it was run for minutes only, for the rate in docs/results.md.
Hardware: an accelerator for the learner and as many CPU cores for actors as there are. Wall time: hours.
Command: python launch/local.py --agent impala --env Pong-v5 --num-actors 4 --envs-per-actor 16
Settings: the paper's. It sums the loss over the rows of a batch where we take the mean, which RMSProp and the clip
undo only if epsilon and the norm are divided by the number of rows; so they are.
"""

from seedx.config import AtariConfig, Config, ImpalaConfig, LearnerConfig, NetworkConfig

_BATCH_SIZE, _UNROLL_LENGTH = 32, 20
_ROWS = _BATCH_SIZE * _UNROLL_LENGTH
_STEPS = 50_000_000  # 200 M frames


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="Pong-v5",
        num_actors=4,
        envs_per_actor=16,
        steps=_STEPS,
        atari=AtariConfig(frame_skip=4, img_size=84, noop_max=30, max_episode_frames=108_000),
        network=NetworkConfig(torso="shallow", frame_stack=4),
        impala=ImpalaConfig(discount=0.99, lambda_=1.0, entropy_cost=0.01, value_cost=0.5, max_abs_reward=1.0),
        learner=LearnerConfig(
            batch_size=_BATCH_SIZE,
            unroll_length=_UNROLL_LENGTH,
            optimizer="rmsprop",
            learning_rate=6e-4,
            learning_rate_end=0.0,
            learning_rate_steps=_STEPS,
            rmsprop_decay=0.99,
            epsilon=0.01 / _ROWS,
            max_grad_norm=40.0 / _ROWS,
        ),
    )
