"""Ape-X DQN on CartPole-v1: value learning from replay, feed-forward.

Expected: mean return of the last 100 episodes >= 430, those of the most exploring environments among them; the run then
stops, and the greedy return is above 475.
Hardware: a laptop CPU with 2 cores. Wall time: see docs/results.md.
Command: python launch/local.py --agent apex
Settings: single transitions with 3 steps, 32 environments that explore from 0.4 to 0.4^8. With a discount of 0.99 or
larger steps runs got stuck near 200: the cart drifts off, which a short horizon does not see coming.
"""

from seedx.config import ApexConfig, Config, LearnerConfig, NetworkConfig, TableConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="apex",
        env="CartPole-v1",
        num_actors=2,
        envs_per_actor=16,
        stop_at_return=430.0,
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
