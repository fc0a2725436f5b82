"""IMPALA on Pendulum-v1: continuous actions; a pole is swung up and held, and every step costs.

Expected: mean return of the last 100 episodes >= -180 (a random policy: -1,250); the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: about a minute; see docs/results.md.
Command: python launch/local.py --env Pendulum-v1
Settings: a short horizon, as each step has its cost. Values start at 0 and must first come down to -60: their loss is
weighted down, the norm is bounded at the size of these gradients only, and small batches make for many updates. The
step shrinks, since what is learned late are small differences.
"""

from seedx.config import Config, ImpalaConfig, LearnerConfig, NetworkConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="Pendulum-v1",
        num_actors=1,
        envs_per_actor=64,
        stop_at_return=-180.0,
        network=NetworkConfig(torso="mlp", hidden=(64, 64)),
        impala=ImpalaConfig(discount=0.9, lambda_=0.9, entropy_cost=0.02, value_cost=0.1),
        learner=LearnerConfig(
            batch_size=32,
            unroll_length=10,
            optimizer="adam",
            learning_rate=2e-3,
            learning_rate_end=1e-4,
            learning_rate_steps=1_500_000,
            epsilon=1e-5,
            max_grad_norm=5.0,
        ),
    )
