"""The recipes for Atari games hold the constants of the papers and programs that they name, in our units.

Losses here are means over transitions. Where the source takes a sum, its gradient is that many times ours, and the same
update needs epsilon and norm of the gradient divided by as much (docs/decisions/0005-losses-are-sums.md).
"""

from functools import reduce
from pathlib import Path

import pytest

from seedx import cli
from seedx.config_file import load_recipe

CONFIGS = Path(__file__).parent.parent / "configs"

# IMPALA's Atari runs, arXiv 1802.01561. Sums over 32 x 20 rows. RMSProp's decay is that of the authors' scalable_agent.
IMPALA = {
    "env": "Pong-v5",
    "steps": 200_000_000 / 4,
    "atari.frame_skip": 4,
    "network.torso": "shallow",
    "network.frame_stack": 4,
    "impala.discount": 0.99,
    "impala.lambda_": 1.0,
    "impala.clip_rho": 1.0,
    "impala.clip_pg_rho": 1.0,
    "impala.entropy_cost": 0.01,
    "impala.value_cost": 0.5,
    "impala.max_abs_reward": 1.0,
    "learner.batch_size": 32,
    "learner.unroll_length": 20,
    "learner.optimizer": "rmsprop",
    "learner.learning_rate": 6e-4,
    "learner.learning_rate_end": 0.0,
    "learner.learning_rate_steps": 200_000_000 / 4,
    "learner.rmsprop_decay": 0.99,
    "learner.epsilon": 0.01 / 640,
    "learner.max_grad_norm": 40.0 / 640,
}

# What SEED RL's R2D2 has as in the paper (Kapturowski et al., ICLR 2019, OpenReview r1lyTjAqYX). Sums over the 80
# transitions of a sequence, means over the batch.
R2D2 = {
    "env": "Pong-v5",
    "atari.frame_skip": 4,
    "atari.full_action_space": True,
    "atari.noop_max": 30,
    "atari.max_episode_frames": 108_000,
    "atari.episodic_life": False,
    "atari.repeat_action_probability": 0.0,
    "network.torso": "shallow",
    "network.lstm": 512,
    "network.frame_stack": 4,
    "network.previous_action": True,
    "network.dueling_hidden": 512,
    "r2d2.discount": 0.997,
    "r2d2.num_steps": 5,
    "r2d2.rescale": True,
    "r2d2.priority_eta": 0.9,
    "r2d2.epsilon": 0.4,
    "r2d2.epsilon_power": 8.0,  # 1 + alpha of Ape-X, 7
    "r2d2.max_abs_reward": 0.0,
    "learner.unroll_length": 80,
    "learner.burn_in": 40,
    "learner.optimizer": "adam",
    "learner.learning_rate": 1e-4,
    "learner.epsilon": 1e-3 / 80,
    "learner.max_grad_norm": 80.0 / 80,
    "learner.target_period": 2500,
    "table.sampler": "prioritized",
    "table.priority_exponent": 0.9,
    "table.max_times_sampled": 0,
}

# The paper: 256 actors, 4 M observations in sequences that begin 40 apart, 10 G frames (both as others quote it), no
# importance weights.
R2D2_PAPER = R2D2 | {
    "num_actors * envs_per_actor": 256,
    "steps": 10_000_000_000 / 4,
    "learner.batch_size": 64,
    "learner.period": 40,
    "table.importance_exponent": 0.0,
    "table.max_size": 4_000_000 / 40,
    "table.samples_per_insert": 0.0,
}

# SEED RL, its train_atari.sh for R2D2: 32 x 20 environments, 50 G frames, sequences that overlap by the burn-in.
SEED = R2D2 | {"learner.period": 0, "table.importance_exponent": 0.6, "table.samples_per_insert": 0.75}
R2D2_SEED = SEED | {
    "num_actors * envs_per_actor": 640,
    "steps": 50_000_000_000 / 4,
    "learner.batch_size": 64,
    "table.max_size": 100_000,
    "table.min_size": 5_000,
}

# The same on one machine.
R2D2_ATARI = SEED | {"learner.batch_size": 32, "table.max_size": 100_000 / 80}

# Ape-X DQN, arXiv 1803.00933, as others quote it; table and actors are smaller here.
APEX = {
    "env": "Pong-v5",
    "atari.frame_skip": 4,
    "atari.noop_max": 30,
    "network.torso": "shallow",
    "network.lstm": 0,
    "network.frame_stack": 4,
    "apex.discount": 0.99,
    "apex.num_steps": 3,
    "apex.epsilon": 0.4,
    "apex.epsilon_power": 8.0,  # 1 + alpha, 7
    "apex.max_abs_reward": 1.0,
    "learner.batch_size": 512,
    "learner.unroll_length": 3,
    "learner.period": 1,
    "learner.burn_in": 0,
    "learner.optimizer": "rmsprop",
    "learner.learning_rate": 0.00025 / 4,
    "learner.rmsprop_decay": 0.95,
    "learner.epsilon": 1.5e-7,
    "learner.max_grad_norm": 40.0,
    "learner.target_period": 2500,
    "table.sampler": "prioritized",
    "table.remover": "fifo",
    "table.priority_exponent": 0.6,
    "table.importance_exponent": 0.4,
    "table.max_times_sampled": 0,
}


@pytest.mark.parametrize(
    ("recipe", "constants"),
    [
        ("impala_atari", IMPALA),
        ("r2d2_paper", R2D2_PAPER),
        ("r2d2_seed", R2D2_SEED),
        ("r2d2_atari", R2D2_ATARI),
        ("apex_atari", APEX),
    ],
)
def test_a_recipe_has_the_constants_of_its_source(recipe, constants):
    config = load_recipe(CONFIGS / f"{recipe}.py")

    def value(place):
        parts = place.split(" * ")
        if len(parts) > 1:
            return value(parts[0]) * value(parts[1])
        return reduce(getattr, place.split("."), config)

    found = {place: value(place) for place in constants}
    assert found == {
        place: pytest.approx(wanted, rel=1e-12) if isinstance(wanted, float) else wanted
        for place, wanted in constants.items()
    }


@pytest.mark.parametrize("agent", ["r2d2", "apex"])
@pytest.mark.parametrize("env", [[], ["--env", "Pong-v5"], ["--env", "Acrobot-v1"]], ids=["own", "atari", "other"])
def test_the_default_tables_hold_no_more_than_100_000_transitions(agent, env):
    config = cli.parse(["--agent", agent, *env])
    assert 0 < config.table.max_size * config.learner.stride <= 100_000
