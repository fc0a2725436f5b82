"""The part of `grpo.py race` that TRL's GRPOTrainer plays, in an interpreter with torch, transformers and trl.

Its argument is what `grpo_race.settings_of` gives, as JSON.
"""

import json
import sys
import tempfile

import torch  # pyrefly: ignore [missing-import]
from datasets import Dataset  # pyrefly: ignore [missing-import]
from grpo_race_goal import Goal, read_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer  # pyrefly: ignore [missing-import]
from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore [missing-import]


def main(settings: dict) -> None:
    """Trains until the goal."""
    goal = Goal(settings["window"], settings["limit_s"])
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            reward_funcs=lambda completions, answer, **_: goal.score(completions, answer),
            args=make_config(settings, output),
            train_dataset=Dataset.from_list(read_prompts(settings["model"])),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        )
        goal.time(trainer.train)


def make_config(settings: dict, output: str) -> GRPOConfig:
    """One optimizer step for each batch of completions, without anything that is not learning."""
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        seed=settings["seed"],
        per_device_train_batch_size=settings["groups"] * settings["group_size"],
        num_generations=settings["group_size"],
        steps_per_generation=1,
        shuffle_dataset=False,
        max_steps=10**6,
        max_completion_length=settings["max_tokens"],
        temperature=settings["temperature"],
        beta=0.0,
        epsilon=settings["clip"],
        loss_type="dapo",  # the mean over all tokens
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        adam_epsilon=settings["epsilon"],
        max_grad_norm=settings["max_grad_norm"],
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
