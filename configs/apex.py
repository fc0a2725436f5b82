"""Ape-X DQN for small environments: a start for your own.

Expected: nothing is claimed; the run goes on until --steps, --seconds or --stop-at-return.
Hardware: a laptop CPU with 2 cores. Wall time: yours to say.
Command: python launch/local.py --agent apex --env ENV
Settings: those of configs/apex_cartpole.py, without an end.
"""

from seedx.config import ApexConfig, Config, LearnerConfig, NetworkConfig, TableConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="apex",
        num_actors=2,
        envs_per_actor=16,
        network=NetworkConfig(torso="mlp", hidden=(128,), dueling_hidden=128),
        apex=ApexConfig(discount=0.995, num_steps=3),
        learner=LearnerConfig(
            batch_size=256,
            unroll_length=3,
            period=1,
            optimizer="adam",
            learning_rate=5e-4,
            learning_rate_end=1e-4,
            learning_rate_steps=400_000,
            epsilon=1e-5,
            max_grad_norm=40.0,
            target_period=100,
        ),
        table=TableConfig(
            sampler="prioritized",
            priority_exponent=0.6,
            importance_exponent=0.4,
            max_size=50_000,
            max_times_sampled=0,
            min_size=2_000,
            samples_per_insert=4.0,
        ),
    )
