"""IMPALA on MiniGrid: DoorKey-5x5, where a key must be fetched, a door opened and a goal reached; one late reward.

Expected: mean return of the last 100 episodes >= 0.96 (a random policy: 0.03); the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: about a minute; see docs/results.md.
Command: python launch/local.py --env MiniGrid-DoorKey-5x5-v0
Settings: the defaults, with a small entropy bonus. Returns lie below 1 and depend little on single steps: a larger
bonus keeps the policy so random that it stays at 0.95, and it may walk in circles when it then acts greedily.
"""

from seedx.config import Config, ImpalaConfig, LearnerConfig, NetworkConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="MiniGrid-DoorKey-5x5-v0",
        num_actors=2,
        envs_per_actor=32,
        stop_at_return=0.96,
        network=NetworkConfig(torso="mlp", hidden=(64, 64)),
        impala=ImpalaConfig(discount=0.99, entropy_cost=0.002, value_cost=0.5),
        learner=LearnerConfig(
            batch_size=32,
            unroll_length=20,
            optimizer="adam",
            learning_rate=1e-3,
            epsilon=1e-5,
            max_grad_norm=0.5,
        ),
    )
