"""The part of grpo.py that TRL's GRPOTrainer plays, in an interpreter with torch, transformers and trl.

Its argument is JSON: {"llama": settings of a LlamaConfig with random weights, "updates": n}. The work is the same: a
step for 64 completions of 64 tokens in groups of 8, prompts of 16 letters, a reward that counts a letter. Prints the
seconds of each step but the first two.
"""

import json
import random
import sys
import tempfile
import time

import torch  # pyrefly: ignore [missing-import]
from datasets import Dataset  # pyrefly: ignore [missing-import]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (  # pyrefly: ignore [missing-import]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore [missing-import]

LETTERS = [chr(48 + i) for i in range(64)]


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        """Notes the time."""
        self.ends.append(time.perf_counter())


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter; the one that ends texts is never drawn before the 64th."""
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=LETTERS[0]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=LETTERS[0], eos_token=LETTERS[1])


def main(settings: dict) -> list[float]:
    """Seconds of the steps."""
    torch.manual_seed(0)
    draw = random.Random(0)
    prompts = ["".join(draw.choices(LETTERS, k=16)) for _ in range(999)]
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=64,
            num_generations=8,
            steps_per_generation=1,
            max_completion_length=64,
            generation_kwargs={"min_new_tokens": 64},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            gradient_checkpointing=False,
            max_steps=settings["updates"] + 2,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(LlamaConfig(**settings["llama"])),
            reward_funcs=lambda completions, **_: [float(text.count("A")) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
            callbacks=[clock],
        )
        trainer.train()
    return [after - before for before, after in zip(clock.ends[1:-1], clock.ends[2:], strict=True)]


if __name__ == "__main__":
    print("SECONDS", json.dumps(main(json.loads(sys.argv[1]))), flush=True)
