"""IMPALA on CartPole-v1 for throughput: few processes, large environment groups, large batches.

Expected: mean return of the last 100 episodes >= 475; the run then stops.
Hardware: a CPU with 2 cores. Wall time: see docs/results.md, also for the rate.
Command: python launch/local.py --config configs/impala_cartpole_fast.py
Settings: one actor steps two groups of 1,024 environments, each a message; a learner's batch is one group's unroll, so
that nothing is copied together. Microbatches keep an update's activations in the cache of the processor.
"""

from seedx.config import ActorConfig, Config, ImpalaConfig, LearnerConfig, NetworkConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="impala",
        env="CartPole-v1",
        num_actors=1,
        envs_per_actor=2048,
        stop_at_return=475.0,
        actor=ActorConfig(groups=2),
        network=NetworkConfig(torso="mlp", hidden=(64, 64)),
        impala=ImpalaConfig(discount=0.98, entropy_cost=0.01, value_cost=0.02),
        learner=LearnerConfig(
            batch_size=1024,
            unroll_length=20,
            microbatches=4,
            learning_rate=4e-3,
            epsilon=1e-5,
            max_grad_norm=0.5,
        ),
    )
