"""IMPALA on CartPole-v1: the smoke test of the whole runtime, and the defaults of `--agent impala`.

Expected: mean return of the last 100 episodes >= 475, the environment's own bar for solved; the run then stops.
Hardware: a laptop CPU with 2 cores. Wall time: see docs/results.md.
Command: python launch/local.py --agent impala
Settings: small batches and a large step that shrinks, since 150,000 to 250,000 steps suffice. Returns reach 50 under
discount .98 while the policy's gradient is of order 1, so the value loss is weighted down to leave the shared layers
to the policy. A queue of one batch keeps the data fresh.
"""

from seedx.config import Config, ImpalaConfig, LearnerConfig, NetworkConfig, TableConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="CartPole-v1",
        num_actors=2,
        envs_per_actor=32,
        stop_at_return=475.0,
        network=NetworkConfig(torso="mlp", hidden=(64, 64)),
        impala=ImpalaConfig(discount=0.98, entropy_cost=0.01, value_cost=0.02),
        learner=LearnerConfig(
            batch_size=16,
            unroll_length=20,
            optimizer="adam",
            learning_rate=4e-3,
            learning_rate_end=4e-4,
            learning_rate_steps=300_000,
            epsilon=1e-5,
            max_grad_norm=0.5,
        ),
        table=TableConfig(max_size=16),
    )
