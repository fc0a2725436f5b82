"""R2D2 on an Atari game, SEED RL's settings scaled down to one machine, one game a run.

Expected: no score is claimed; it was run for minutes.
Hardware: an accelerator, as many CPU cores for actors as there are, and 0.8 GB of memory for the table. Wall time:
days.
Command: python launch/local.py --agent r2d2 --env Pong-v5
Settings: those of configs/r2d2_seed.py but for sizes: a table of 1,250 sequences, 100,000 transitions, instead of
100,000 sequences, of which 128 come before the first update instead of 5,000; as many actors as a machine has, and
half a batch.
"""

from seedx.config import AtariConfig, Config, LearnerConfig, NetworkConfig, R2D2Config, TableConfig

_UNROLL_LENGTH = 80


def config() -> Config:
    """The recipe."""
    return Config(
        agent="r2d2",
        env="Pong-v5",
        num_actors=4,
        envs_per_actor=16,
        eval_actors=1,
        steps=50_000_000,  # 200 M frames
        atari=AtariConfig(full_action_space=True, noop_max=30, max_episode_frames=108_000),
        network=NetworkConfig(
            torso="shallow", lstm=512, frame_stack=4, previous_action=True, activation="relu", dueling_hidden=512
        ),
        r2d2=R2D2Config(discount=0.997, num_steps=5, priority_eta=0.9, epsilon=0.4, epsilon_power=8.0),
        learner=LearnerConfig(
            batch_size=32,
            burn_in=40,
            unroll_length=_UNROLL_LENGTH,
            optimizer="adam",
            learning_rate=1e-4,
            epsilon=1e-3 / _UNROLL_LENGTH,
            max_grad_norm=80.0 / _UNROLL_LENGTH,
            target_period=2500,
        ),
        table=TableConfig(
            sampler="prioritized",
            priority_exponent=0.9,
            importance_exponent=0.6,
            max_size=1_250,
            max_times_sampled=0,
            min_size=128,
            samples_per_insert=0.75,
        ),
    )
