"""How token losses become one number: what each token of a sequence counts.

The weights are made on the host from the lengths of the whole batch, so the loss on the devices is a plain sum of loss
times weight. No shard or microbatch has a mean of its own, hence the gradient does not depend on how a batch is split.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float32, Int

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length", "fixed-length-sum"]


def sequence_weights(
    mode: Aggregation, lengths: Int[np.ndarray, "N"], fixed_length: int | None = None
) -> Float32[np.ndarray, "N"]:
    """What each token of a sequence counts in the sum that is the loss; 0 for an empty sequence.

    With n_i the lengths, M the number of sequences that are not empty, and L the fixed length:

    | mode | weight | known as |
    |---|---|---|
    | token-mean | 1 / sum_i n_i | DAPO (2503.14476); the default of verl and OpenRLHF, TRL's "dapo" |
    | seq-mean-token-mean | 1 / (M n_i) | GRPO (2402.03300), GSPO; the default of tunix, TRL's "grpo" |
    | seq-mean-token-sum | 1 / M | the likelihood of whole sequences, so RLOO; verl's mode of this name |
    | fixed-length | 1 / (M L) | Dr. GRPO (2503.20783); TRL's "dr_grpo", tunix's "token-scale" |
    | fixed-length-sum | 1 / L | verl's "seq-mean-token-sum-norm", which does not divide by M |

    Args:
        mode: See above.
        lengths: Tokens that count of each sequence of the global batch, whatever an importance weight makes of them.
        fixed_length: L, the most tokens of a completion; only the last two modes read it.

    Raises:
        ValueError: The mode needs a fixed length, and it is missing or below 1.
    """
    filled = lengths > 0
    count = max(int(filled.sum()), 1)
    match mode:
        case "token-mean":
            tokens = np.full(lengths.shape, max(int(lengths.sum()), 1))
        case "seq-mean-token-mean":
            tokens = count * np.maximum(lengths, 1)
        case "seq-mean-token-sum":
            tokens = np.full(lengths.shape, count)
        case "fixed-length":
            tokens = np.full(lengths.shape, count * _checked(mode, fixed_length))
        case "fixed-length-sum":
            tokens = np.full(lengths.shape, _checked(mode, fixed_length))
    return np.where(filled, 1.0 / tokens, 0.0).astype(np.float32)


def _checked(mode: Aggregation, fixed_length: int | None) -> int:
    if fixed_length is None or fixed_length < 1:
        raise ValueError(
            f'Aggregation "{mode}" divides by a fixed length of at least 1 token, got {fixed_length}; give the most '
            "tokens that a completion can have."
        )
    return fixed_length
