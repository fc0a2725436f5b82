"""IMPALA on CartPole-v1: the smoke test of the whole runtime, and the defaults of `--agent impala`.

Expected: mean return of the last 100 episodes >= 475, the environment's own bar for solved; the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: under 30 s, start-up included.
Command: python launch/local.py --agent impala
Settings: network 2x64 and discount as is usual for CartPole; V-trace as in 1802.01561.
"""

from seedx.config import Config, ImpalaConfig, LearnerConfig, NetworkConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="CartPole-v1",
        num_actors=2,
        envs_per_actor=32,
        stop_at_return=475.0,
        network=NetworkConfig(torso="mlp", hidden=(64, 64)),
        impala=ImpalaConfig(discount=0.99, entropy_cost=0.01, value_cost=0.5),
        learner=LearnerConfig(
            batch_size=32,
            unroll_length=20,
            optimizer="adam",
            learning_rate=1e-3,
            epsilon=1e-5,
            max_grad_norm=0.5,
        ),
    )
