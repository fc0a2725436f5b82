"""IMPALA on the built-in game of catch: a ball falls, a paddle must be under it; return +1 or -1.

Expected: mean return of the last 100 episodes >= 0.95; the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: under a minute.
Command: python launch/local.py --env catch
Settings: those of configs/impala_cartpole.py, with shorter unrolls as episodes last nine steps.
"""

from seedx.config import Config, ImpalaConfig, LearnerConfig, NetworkConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="catch",
        num_actors=2,
        envs_per_actor=32,
        stop_at_return=0.95,
        network=NetworkConfig(torso="mlp", hidden=(64, 64)),
        impala=ImpalaConfig(discount=0.99, entropy_cost=0.01, value_cost=0.5),
        learner=LearnerConfig(
            batch_size=32,
            unroll_length=10,
            optimizer="adam",
            learning_rate=1e-3,
            epsilon=1e-5,
            max_grad_norm=0.5,
        ),
    )
