"""R2D2 on an Atari game with the settings of its paper (Kapturowski et al., ICLR 2019), one game a run.

Expected: nothing is claimed; the settings are written down and were not run.
Hardware: an accelerator, CPU cores for 256 environments, and 29 GB of memory for the table, so 58 GB in all: lower
--table.max-size to what there is. Wall time: days.
Command: python launch/local.py --config configs/r2d2_paper.py --env Pong-v5
Settings: the paper's, as far as they are known: sequences of 80 after a burn-in of 40, one begins every 40 rows, no
importance weights. Epsilon and norm are divided by 80, since we take the mean over transitions.
"""

from seedx.config import AtariConfig, Config, LearnerConfig, NetworkConfig, R2D2Config, TableConfig

_UNROLL_LENGTH = 80


def config() -> Config:
    """The recipe."""
    return Config(
        agent="r2d2",
        env="Pong-v5",
        num_actors=32,
        envs_per_actor=8,
        eval_actors=1,
        steps=2_500_000_000,  # 10 G frames
        atari=AtariConfig(full_action_space=True, noop_max=30, max_episode_frames=108_000),
        network=NetworkConfig(
            torso="shallow", lstm=512, frame_stack=4, previous_action=True, activation="relu", dueling_hidden=512
        ),
        r2d2=R2D2Config(discount=0.997, num_steps=5, priority_eta=0.9, epsilon=0.4, epsilon_power=8.0),
        learner=LearnerConfig(
            batch_size=64,
            burn_in=40,
            unroll_length=_UNROLL_LENGTH,
            period=40,
            optimizer="adam",
            learning_rate=1e-4,
            epsilon=1e-3 / _UNROLL_LENGTH,
            max_grad_norm=80.0 / _UNROLL_LENGTH,
            target_period=2500,
        ),
        table=TableConfig(
            sampler="prioritized",
            priority_exponent=0.9,
            importance_exponent=0.0,
            max_size=100_000,  # 4 M observations in steps of 40
            max_times_sampled=0,
            min_size=5_000,
            max_bytes=38 * 2**30,
        ),
    )
