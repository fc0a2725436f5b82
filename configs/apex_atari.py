"""Ape-X DQN on an Atari game (1803.00933), scaled down to one machine, one game a run.

Expected: no score is claimed; it was run for a minute, with smaller batches.
Hardware: an accelerator, as many CPU cores for actors as there are, and half a GB of memory for the table. Wall time:
hours.
Command: python launch/local.py --agent apex --env Pong-v5
Settings: the paper's but for sizes: a table of 60,000 transitions instead of 2 M, of which 5,000 come before the first
update instead of 50,000, and as many actors as a machine has. The paper's centred RMSProp is plain here. Its actors and
learner do not wait for each other; here each transition is sampled 8 times on average.
"""

from seedx.config import ApexConfig, AtariConfig, Config, LearnerConfig, NetworkConfig, TableConfig


def config() -> Config:
    """The recipe."""
    return Config(
        agent="apex",
        env="Pong-v5",
        num_actors=4,
        envs_per_actor=16,
        steps=50_000_000,  # 200 M frames
        atari=AtariConfig(noop_max=30, max_episode_frames=108_000),
        network=NetworkConfig(torso="shallow", frame_stack=4, dueling_hidden=512),
        apex=ApexConfig(discount=0.99, num_steps=3, epsilon=0.4, epsilon_power=8.0, max_abs_reward=1.0),
        learner=LearnerConfig(
            batch_size=512,
            unroll_length=3,
            period=1,
            optimizer="rmsprop",
            learning_rate=0.00025 / 4,
            rmsprop_decay=0.95,
            epsilon=1.5e-7,
            max_grad_norm=40.0,
            target_period=2500,
        ),
        table=TableConfig(
            sampler="prioritized",
            priority_exponent=0.6,
            importance_exponent=0.4,
            max_size=60_000,
            max_times_sampled=0,
            min_size=5_000,
            samples_per_insert=8.0,
        ),
    )
