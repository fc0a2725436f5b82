"""The settings of an LLM run's parts, one frozen dataclass for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seedx.checks import not_negative, positive, require
from seedx.device_config import parse_bytes


@dataclass(frozen=True)
class GrpoConfig:
    """The policy loss over groups of completions (2402.03300) and its variants; docs/grpo.md lists combinations.

    Attributes:
        group_size: G, completions of a prompt.
        advantage: What a completion's reward is compared with, and divided by. group_std: its group's mean and
            deviation (GRPO). group_mean: the mean alone (Dr. GRPO, 2503.20783). batch_std: its group's mean and the
            deviation of all. leave_one_out: the mean of the others (RLOO, 2402.14740). whitened: mean and deviation
            over all tokens, after the group's mean (REINFORCE++-baseline, 2501.03262). gae: of each token, with the
            values of a head that is trained with the policy, whitened over all tokens (PPO, 1707.06347; 1506.02438).
        gae_lambda: Of gae: 1 compares the whole reward with the value, less trusts later values more.
        discount: Of gae: what a reward loses with each token that is sampled before it.
        value_cost: Of gae: weight of the value loss.
        value_clip: Of gae: how far from its old value a value may go to be better (PPO's clipped value loss); 0: any.
        loss: clip: of each token's ratio (1707.06347). gspo: of a completion's (2507.18071). cispo: the clipped ratio
            weighs the log-probability, so that no token loses its gradient (2506.13585).
        clip_low: Ratios below 1 - clip_low are clipped.
        clip_high: Ratios above 1 + clip_high are clipped.
        dual_clip: Bound of the ratio where the advantage is negative (1912.09729), above 1; 0: none.
        aggregation: What the tokens' losses are divided by; see `learner/aggregation.py`.
        old: Whose log-probabilities the ratio is relative to: behaviour, the engine's of each token; recomputed, the
            learner's before the update (decoupled, 2505.24298).
        importance: With recomputed ones, what becomes of a token whose weight exp(recomputed - behaviour) is beyond the
            bound: truncate it, or mask the token; none: no weights.
        importance_bound: Greatest weight, above 1.
        kl_cost: Weight of the divergence from the model that the run began with; 0: none.
        kl: Its estimator; k2 and k3+ have the gradient of KL(policy || reference).
        entropy_cost: Weight of the entropy bonus.
        dynamic_sampling: Whether groups whose rewards are all equal make room for others (DAPO, 2503.14476).
        max_discarded: Groups that may be left out so in a row, in batches; then there is no signal, and the run ends.
        mask_truncated: Whether completions that were cut at `rollout.max_tokens` are left out of the loss.
        overlong_tokens: Tokens before `rollout.max_tokens` over which the reward falls by up to 1 (DAPO, eq. 13); 0:
            none.
    """

    group_size: int = 8
    advantage: Literal["group_std", "group_mean", "batch_std", "leave_one_out", "whitened", "gae"] = "group_std"
    gae_lambda: float = 1.0
    discount: float = 1.0
    value_cost: float = 0.5
    value_clip: float = 0.0
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length", "fixed-length-sum"
    ] = "token-mean"
    old: Literal["behaviour", "recomputed"] = "behaviour"
    importance: Literal["none", "truncate", "mask"] = "none"
    importance_bound: float = 2.0
    kl_cost: float = 0.0
    kl: Literal["k1", "k2", "k3", "k3+"] = "k3+"
    entropy_cost: float = 0.0
    dynamic_sampling: bool = False
    max_discarded: int = 20
    mask_truncated: bool = False
    overlong_tokens: int = 0

    def __post_init__(self) -> None:
        least = 1 if self.advantage == "gae" else 2
        require(
            self.group_size >= least,
            f"grpo.group_size ({self.group_size}) must be at least {least}"
            + ("." if least == 1 else ": a completion is compared with others, unless --grpo.advantage is gae."),
        )
        require(
            self.advantage != "gae" or not self.dynamic_sampling,
            f"grpo.dynamic_sampling ({self.dynamic_sampling}) must be off with --grpo.advantage gae, which learns from "
            "groups whose rewards are all equal too; give --grpo.no-dynamic-sampling.",
        )
        for name in ("gae_lambda", "discount"):
            require(0 <= getattr(self, name) <= 1, f"grpo.{name} ({getattr(self, name)}) must lie in [0, 1].")
        positive(self, "clip_low", "clip_high", "max_discarded")
        not_negative(self, "kl_cost", "entropy_cost", "overlong_tokens", "value_cost", "value_clip")
        require(self.clip_low < 1, f"grpo.clip_low ({self.clip_low}) must be below 1: ratios are positive.")
        require(self.dual_clip == 0 or self.dual_clip > 1, f"grpo.dual_clip ({self.dual_clip}) must be 0, or above 1.")
        require(self.importance_bound > 1, f"grpo.importance_bound ({self.importance_bound}) must be above 1.")
        require(
            self.importance == "none" or self.old == "recomputed",
            f"grpo.importance ({self.importance}) needs --grpo.old recomputed: relative to the engine's "
            "log-probabilities the ratio holds that weight already.",
        )


@dataclass(frozen=True)
class RolloutConfig:
    """Completions of prompts.

    Attributes:
        max_tokens: Of a completion; 0: what the task says, or else 256.
        max_prompt_tokens: Longer prompts are passed over and counted; 0: the longest of the first 2,000 that leave the
            model room for a completion.
        temperature: That tokens are drawn at, and the loss computed at.
        timeout_s: A group that is not complete after so long is asked for again, seconds.
        retries: How often; then the run ends.
        redundant: Completions of a prompt beyond `grpo.group_size`, generated in slots that nothing else wants, that
            stand by for those that are lost, late or without a reward.
        late_s: A completion that is not there so long after its group was asked for is late, seconds; what takes its
            place is shorter on the average. 0: none is late.
    """

    max_tokens: int = 0
    max_prompt_tokens: int = 0
    temperature: float = 1.0
    timeout_s: float = 600.0
    retries: int = 2
    redundant: int = 0
    late_s: float = 0.0

    def __post_init__(self) -> None:
        positive(self, "temperature", "timeout_s")
        not_negative(self, "max_tokens", "max_prompt_tokens", "retries", "redundant", "late_s")
        require(
            self.late_s == 0 or self.redundant > 0,
            f"rollout.late_s ({self.late_s}) must be 0 without redundant completions, which replace what is late; give "
            "--rollout.redundant.",
        )


@dataclass(frozen=True)
class CurriculumConfig:
    """How often prompts come that are always answered right, or never.

    Attributes:
        floor: Probability that such a prompt is taken in an epoch, 0.01 to 1; one that is answered right half of the
            time always is. 1: all prompts are taken in each epoch.
        weight: What a prompt's newest group counts in its success rate, above 0 and at most 1. Success is the mean
            reward, for which rewards should lie within 0 and 1; what is beyond counts as 0 or 1.
    """

    floor: float = 1.0
    weight: float = 0.5

    def __post_init__(self) -> None:
        require(
            0.01 <= self.floor <= 1,
            f"curriculum.floor ({self.floor}) must lie in [0.01, 1]: no prompt is left out for good.",
        )
        require(0 < self.weight <= 1, f"curriculum.weight ({self.weight}) must be above 0 and at most 1.")


@dataclass(frozen=True)
class TextLearnerConfig:
    """The learner of an LLM run.

    Attributes:
        batch_size: Groups of an update.
        microbatches: Parts that the largest batch is computed in, one after the other; smaller ones take fewer.
        row_tokens: Tokens of the rows that sequences are packed into, which share a prompt in a row; 0: of two of the
            longest prompts, or of the longest sequence there may be if that is more.
        learning_rate: Adam's, after `warmup_updates`.
        warmup_updates: Updates over which it rises from 0.
        beta1: Adam's decay of the mean.
        beta2: Adam's decay of the square.
        epsilon: Adam's.
        weight_decay: AdamW's (1711.05101).
        max_grad_norm: Global-norm clip of the gradient; 0: none.
        dtype: That the model is computed in; weights are float32.
        remat: Whether the gradient computes each block anew instead of keeping what is in it.
        zero: What is split over the devices of `mesh.fsdp` (ZeRO, 1910.02054). 1: the optimizer's state; 2: gradients
            too; 3: weights too, which are then sent whenever they are computed with.
    """

    batch_size: int = 8
    microbatches: int = 4
    row_tokens: int = 0
    learning_rate: float = 1e-5
    warmup_updates: int = 0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    zero: Literal[1, 2, 3] = 3

    def __post_init__(self) -> None:
        positive(self, "batch_size", "microbatches", "learning_rate", "epsilon")
        not_negative(self, "row_tokens", "warmup_updates", "weight_decay", "max_grad_norm")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"learner.{name} ({getattr(self, name)}) must lie in [0, 1).")


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning of the task's own answers before the first update.

    Attributes:
        reward: Probability of the right answer, over fresh prompts, at which it ends; 0: there is none.
        batch_size: Prompts of an update.
        learning_rate: Adam's.
        max_updates: Without getting there the run ends.
    """

    reward: float = 0.0
    batch_size: int = 64
    learning_rate: float = 1e-3
    max_updates: int = 5000

    def __post_init__(self) -> None:
        require(0 <= self.reward < 1, f"warm_start.reward ({self.reward}) must lie in [0, 1); 0: no warm start.")
        positive(self, "batch_size", "learning_rate", "max_updates")


@dataclass(frozen=True)
class HeldOutConfig:
    """Evaluation on prompts that are not trained on.

    Attributes:
        num_prompts: Of the test split, at the beginning and at the end; 0: none.
        num_samples: Completions of each.
        interval_updates: Updates between further evaluations; 0: none.
    """

    num_prompts: int = 200
    num_samples: int = 1
    interval_updates: int = 0

    def __post_init__(self) -> None:
        not_negative(self, "num_prompts", "interval_updates")
        positive(self, "num_samples")


@dataclass(frozen=True)
class DecodeConfig:
    """The decode engine of an LLM run.

    Attributes:
        max_concurrent: Completions that are generated at a time, at most.
        memory_budget: What its weights, caches and intermediate results may take, for example 4GB; None: a quarter of
            the memory. Several decode hosts have as much each, but share the quarter.
        steps_per_dispatch: Tokens that each slot gets from one launch.
    """

    max_concurrent: int = 64
    memory_budget: str | None = None
    steps_per_dispatch: int = 8

    def __post_init__(self) -> None:
        positive(self, "max_concurrent", "steps_per_dispatch")
        parse_bytes(self.memory_budget, "--decode.memory-budget")
