"""Advantages of completions whose policy has no value head, on the host.

A reward of NaN means that the completion could not be scored. It enters no mean and no deviation, its advantage is 0,
and the loss leaves the row out. Where all rewards that are compared are equal the advantages are exactly 0: a residue
of rounding, divided by a small deviation, would be as large as a real advantage.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from seedx.learner.token_gae import token_gae

Scale = Literal["std", "batch_std", "none"]

_EQUAL = 1e-6  # values that differ by less than this part of the largest are the same value, rounded


def group_relative(
    rewards: Float[np.ndarray, "P G"], scale: Scale = "std", *, ddof: int = 1, eps: float = 1e-4
) -> Float32[np.ndarray, "P G"]:
    """(r - mean of the group) / (std + eps), GRPO's advantage (2402.03300, section 4.1).

    The defaults are TRL's; verl and tunix have eps 1e-6, OpenRLHF 1e-9. A group with one scored completion gets 0.

    Args:
        rewards: Of G completions for each of P prompts; NaN: could not be scored.
        scale: What the difference is divided by: the group's deviation, the whole batch's, or nothing, which is
            Dr. GRPO (2503.20783).
        ddof: 1 divides the squares by G - 1, 0 by G.
        eps: Added to the deviation.

    Raises:
        ValueError: A reward is infinite.
    """
    scored = _scored(rewards)
    centred = _centred(rewards, scored, axis=1)
    match scale:
        case "std":
            std = _std(centred, scored, ddof, axis=1)
        case "batch_std":
            std = _std(_centred(rewards, scored), scored, ddof)
        case "none":
            return centred.astype(np.float32)
    return (centred / np.where(std > 0, std + eps, 1.0)).astype(np.float32)


def leave_one_out(rewards: Float[np.ndarray, "P G"]) -> Float32[np.ndarray, "P G"]:
    """r_i less the mean of the group's other rewards, RLOO's advantage (2402.14740).

    A group with one scored completion has no baseline and gets 0.

    Args:
        rewards: Of G completions for each of P prompts; NaN: could not be scored.

    Raises:
        ValueError: A reward is infinite.
    """
    scored = _scored(rewards)
    count = scored.sum(axis=1, keepdims=True)
    return (_centred(rewards, scored, axis=1) * count / np.maximum(count - 1, 1)).astype(np.float32)


def spread(rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """Whether a group's scored rewards differ, without which its advantages are 0 and it teaches nothing.

    Raises:
        ValueError: A reward is infinite.
    """
    return _spread(rewards, _scored(rewards), axis=1)[:, 0]


def returns_to_go(
    rewards: Float[np.ndarray, "*B L"],
    mask: Bool[np.ndarray, "*B L"],
    sequence: Int[np.ndarray, "*B L"],
    *,
    discount: float = 1.0,
) -> Float32[np.ndarray, "*B L"]:
    """Discounted sum of a sequence's rewards from each sampled token on, 0 elsewhere; arguments as of `token_gae`.

    `whiten` of it is REINFORCE++'s advantage, where the rewards hold -beta k1 and, at the last token, the outcome.
    """
    return token_gae(rewards, np.zeros_like(rewards), mask, sequence, discount=discount, lambda_=1.0).advantages


def whiten(values: Float[np.ndarray, "*B"], mask: Bool[np.ndarray, "*B"]) -> Float32[np.ndarray, "*B"]:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens where mask is True, 0 elsewhere (REINFORCE++, 2501.03262).

    The variance is Bessel's. Statistics are those of the arguments: give it the global batch.
    """
    centred = _centred(values, mask)
    return (centred / np.sqrt(_std(centred, mask, ddof=1) ** 2 + 1e-8)).astype(np.float32)


def overlong_penalty(lengths: Int[np.ndarray, "N"], max_length: int, cache: int) -> Float32[np.ndarray, "N"]:
    """What is added to the reward of a long completion, from 0 down to -1 (DAPO, 2503.14476, equation 13).

    Args:
        lengths: Tokens of each completion.
        max_length: Tokens at which the penalty reaches -1.
        cache: Tokens before `max_length` over which it grows linearly.

    Raises:
        ValueError: `cache` is not in 1..max_length.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache is {cache} tokens; allowed: 1 to max_length ({max_length}).")
    return np.clip((max_length - cache - lengths) / cache, -1.0, 0.0).astype(np.float32)


def _scored(rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, "P G"]:
    infinite = np.isinf(rewards)
    if infinite.any():
        raise ValueError(
            f"A reward of group {np.argwhere(infinite)[0, 0]} is {rewards[infinite][0]}; rewards are finite, or NaN "
            "where a completion could not be scored. Bound the reward function."
        )
    return ~np.isnan(rewards)


def _spread(values: np.ndarray, valid: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Whether valid values differ along the axis, which is kept; None: all axes."""
    high = values.max(axis, keepdims=True, initial=-np.inf, where=valid)
    low = values.min(axis, keepdims=True, initial=np.inf, where=valid)
    largest = np.abs(values).max(axis, keepdims=True, initial=0.0, where=valid)
    return high - low > _EQUAL * largest


def _centred(values: np.ndarray, valid: np.ndarray, axis: int | None = None) -> Float64[np.ndarray, "*B"]:
    """Valid values less their mean along the axis; 0 where invalid, and where they do not differ."""
    total = np.sum(values, axis, np.float64, keepdims=True, where=valid)
    mean = total / np.maximum(valid.sum(axis, keepdims=True), 1)
    return np.where(valid & _spread(values, valid, axis), values - mean, 0.0)


def _std(centred: np.ndarray, valid: np.ndarray, ddof: int, axis: int | None = None) -> np.ndarray:
    """Deviation along the axis, which is kept, of values that `_centred` gave."""
    count = valid.sum(axis, keepdims=True)
    return np.sqrt(np.square(centred).sum(axis, keepdims=True) / np.maximum(count - ddof, 1))
