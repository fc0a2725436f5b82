"""R2D2 on the built-in memory game: a cue shown at the start decides the reward at the end.

Expected: mean return of the last 2,000 episodes >= 0.83 while exploring, and 1 greedily; the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: see docs/results.md.
Command: python launch/local.py --agent r2d2
Settings: sequences of 20 transitions after a burn-in of 5, an LSTM of 64, double Q-learning with 3 steps. Returns are 0
or 1 and a cue is easily forgotten again, so the mean is taken over many episodes. Exploration from 0.4 to 0.06 costs
0.14 of the return; with less of it, or smaller steps, runs got stuck with three of the four cues.
"""

from seedx.config import Config, LearnerConfig, MetricsConfig, NetworkConfig, R2D2Config, TableConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="r2d2",
        env="memory",
        num_actors=2,
        envs_per_actor=16,
        eval_actors=1,
        stop_at_return=0.83,
        network=NetworkConfig(torso="mlp", hidden=(64,), lstm=64, dueling_hidden=64),
        r2d2=R2D2Config(discount=0.97, num_steps=3, epsilon_power=3.0),
        learner=LearnerConfig(
            batch_size=32,
            burn_in=5,
            unroll_length=20,
            optimizer="adam",
            learning_rate=3e-3,
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
            min_size=200,
            samples_per_insert=4.0,
        ),
        metrics=MetricsConfig(return_window=2000),
    )
