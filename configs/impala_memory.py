"""IMPALA with an LSTM on the built-in memory game: a cue shown at the start decides the reward at the end.

Expected: mean return of the last 100 episodes >= 0.95, which no policy without memory reaches; the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: under a minute.
Command: python launch/local.py --env memory
Settings: those of configs/impala_cartpole.py, with an LSTM of 64.
"""

from seedx.config import Config, ImpalaConfig, LearnerConfig, NetworkConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="memory",
        num_actors=2,
        envs_per_actor=32,
        stop_at_return=0.95,
        network=NetworkConfig(torso="mlp", hidden=(64,), lstm=64),
        impala=ImpalaConfig(discount=0.99, entropy_cost=0.01, value_cost=0.5),
        learner=LearnerConfig(
            batch_size=32,
            unroll_length=20,
            optimizer="adam",
            learning_rate=3e-3,
            epsilon=1e-5,
            max_grad_norm=0.5,
        ),
    )
