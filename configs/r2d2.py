"""R2D2 for small environments: a start for your own.

Expected: nothing is claimed; the run goes on until --steps, --seconds or --stop-at-return.
Hardware: a laptop CPU with 2 cores. Wall time: yours to say.
Command: python launch/local.py --agent r2d2 --env ENV
Settings: those of configs/r2d2_memory.py, with a longer horizon and a larger table.
"""

from seedx.config import Config, LearnerConfig, NetworkConfig, R2D2Config, TableConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="r2d2",
        num_actors=2,
        envs_per_actor=16,
        eval_actors=1,
        network=NetworkConfig(torso="mlp", hidden=(64,), lstm=64, dueling_hidden=64),
        r2d2=R2D2Config(discount=0.99, num_steps=3),
        learner=LearnerConfig(
            batch_size=32,
            burn_in=5,
            unroll_length=20,
            optimizer="adam",
            learning_rate=1e-3,
            epsilon=1e-3,
            max_grad_norm=40.0,
            target_period=100,
        ),
        table=TableConfig(
            sampler="prioritized",
            priority_exponent=0.9,
            importance_exponent=0.6,
            max_size=5_000,
            max_times_sampled=0,
            min_size=500,
            samples_per_insert=4.0,
        ),
    )
