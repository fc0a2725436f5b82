"""The part of `grpo.py race` that tunix's GRPOLearner plays, in an interpreter with google-tunix.

Its argument is what `grpo_race.settings_of` gives, as JSON. Two things are not as tunix has them, without which it
would not learn the same: its Llama reads rotary positions at a base of 1,000,000 whatever its config says, so that
the base is put right; and its sampler draws with the same key in each step unless it is given another one.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_race_goal import Goal, read_prompts
from transformers import AutoTokenizer  # pyrefly: ignore [missing-import]
from tunix.models.llama3 import model as llama3  # pyrefly: ignore [missing-import]
from tunix.models.llama3 import params as llama3_params  # pyrefly: ignore [missing-import]
from tunix.rl import rl_cluster  # pyrefly: ignore [missing-import]
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # pyrefly: ignore [missing-import]
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyrefly: ignore [missing-import]


def main(settings: dict) -> None:
    """Trains until the goal."""
    goal = Goal(settings["window"], settings["limit_s"])
    train = make_training(settings, lambda completions, answer, **_: goal.score(completions, answer))
    goal.time(train)


def make_training(settings: dict, reward: Callable[..., list[float]]) -> Callable[[], None]:
    """What trains without end on the prompts that lie beside the model."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp"))
    rollout = RolloutConfig(
        max_tokens_to_generate=settings["max_tokens"],
        max_prompt_length=settings["max_prompt_tokens"],
        kv_cache_size=settings["max_prompt_tokens"] + settings["max_tokens"],
        temperature=settings["temperature"],
        top_p=1.0,
    )
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(
            optax.clip_by_global_norm(settings["max_grad_norm"]),
            optax.adam(settings["learning_rate"], settings["beta1"], settings["beta2"], settings["epsilon"]),
        ),
        eval_every_n_steps=10**6,
        max_steps=10**6,
    )
    cluster = rl_cluster.RLCluster(
        actor=load(settings["model"], mesh),
        tokenizer=AutoTokenizer.from_pretrained(settings["model"]),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT), mesh),
            training_config=training,
            rollout_config=rollout,
        ),
    )
    learner = GRPOLearner(
        cluster,
        GRPOConfig(
            num_generations=settings["group_size"], beta=0.0, epsilon=settings["clip"], loss_agg_mode="token-mean"
        ),
        reward,
    )
    return lambda: learner.train(batches(settings, rollout))


def load(directory: str, mesh: jax.sharding.Mesh) -> llama3.Llama3:
    """The model, float32."""
    raw = json.loads((Path(directory) / "config.json").read_text())
    llama3.apply_rope = partial(llama3.apply_rope, rope_theta=raw["rope_theta"])
    config = llama3.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
        weight_tying=raw["tie_word_embeddings"],
    )
    return llama3_params.create_model_from_safe_tensors(directory, config, mesh, jnp.float32)


def batches(settings: dict, rollout: RolloutConfig) -> Iterator[dict[str, np.ndarray]]:
    """Prompts of a step without end, each drawn for with a key of its own."""
    prompts = itertools.cycle(read_prompts(settings["model"]))
    for step in itertools.count():
        rollout.seed = settings["seed"] + step
        taken = list(itertools.islice(prompts, settings["groups"]))
        yield {
            "prompts": np.array([one["prompt"] for one in taken]),
            "answer": np.array([one["answer"] for one in taken]),
        }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
