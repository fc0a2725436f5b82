"""R2D2 on an Atari game as SEED RL trains it (its train_atari.sh), one game a run.

Expected: nothing is claimed; the settings are written down and were not run.
Hardware: an accelerator, CPU cores for 640 environments, and 58 GB of memory for the table, so 116 GB in all: lower
--table.max-size to what there is. Wall time: days.
Command: python launch/local.py --config configs/r2d2_seed.py
Settings: SEED RL's. It sums the loss over a sequence where we take the mean over transitions, which Adam and the clip
undo only if epsilon and the norm are divided by the transitions of a sequence; so they are. Its scripts leave the
frame skip at 1; the usual 4 is taken here.
"""

from seedx.config import AtariConfig, Config, LearnerConfig, NetworkConfig, R2D2Config, TableConfig

_UNROLL_LENGTH = 80


def config() -> Config:
    """The recipe."""
    return Config(
        agent="r2d2",
        env="Pong-v5",
        num_actors=32,
        envs_per_actor=20,
        eval_actors=1,
        steps=12_500_000_000,  # 50 G frames
        atari=AtariConfig(full_action_space=True, noop_max=30, max_episode_frames=108_000),
        network=NetworkConfig(
            torso="shallow", lstm=512, frame_stack=4, previous_action=True, activation="relu", dueling_hidden=512
        ),
        r2d2=R2D2Config(discount=0.997, num_steps=5, priority_eta=0.9, epsilon=0.4, epsilon_power=8.0),
        learner=LearnerConfig(
            batch_size=64,
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
            max_size=100_000,
            max_times_sampled=0,
            min_size=5_000,
            samples_per_insert=0.75,
            max_bytes=68 * 2**30,
        ),
    )
