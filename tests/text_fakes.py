"""Groups of completions made by hand or at random, and language models small enough to write out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedx.envs.text.group import Group, Sample, to_item
from seedx.learner.token_logprobs import Model
from seedx.replay.items import join


class Completion(NamedTuple):
    tokens: list
    reward: float = 0.0
    environment: tuple = ()  # places of tokens that were not sampled
    finish_reason: str = "stop"
    version: int = 0


def sample_of(completion, logprobs=None):
    count = len(completion.tokens)
    sampled = ~np.isin(np.arange(count), completion.environment)
    logprobs = -np.arange(1, count + 1) / 8 if logprobs is None else logprobs
    return Sample(
        np.array(completion.tokens, np.int32),
        sampled,
        np.where(sampled, logprobs, 0.0).astype(np.float32),
        np.where(sampled, completion.version, 0).astype(np.int32),
        completion.finish_reason,
        "",
        None if np.isnan(completion.reward) else {"right": completion.reward},
        completion.reward,
    )


def items_of(*groups):
    """Items of (prompt, completions) pairs, at positions 0, 1, ..."""
    return join(
        [
            to_item(Group(i, np.array(prompt, np.int32), [sample_of(completion) for completion in completions]))
            for i, (prompt, completions) in enumerate(groups)
        ]
    )


def random_items(seed, num_groups=3, group_size=4, vocab=16, longest=8):
    """Groups as they come: several turns, one completion without a score, some cut off, different rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for i in range(num_groups):
        samples = []
        for j in range(group_size):
            count = int(rng.integers(1, longest + 1))
            completion = Completion(
                rng.integers(0, vocab, count).tolist(),
                np.nan if i == j == 0 else float(rng.normal()),
                (1,) if count > 3 else (),
                "length" if count == longest else "stop",
            )
            samples.append(sample_of(completion, rng.normal(-2, 0.5, count)))
        prompt = rng.integers(0, vocab, rng.integers(1, 5)).astype(np.int32)
        groups.append(to_item(Group(i, prompt, samples)))
    return join(groups)


def spoilt_items(seed, **options):
    """Like `random_items`, but for a log-probability that is NaN, which no update survives."""
    items = random_items(seed, **options)
    items.rows["logprob"][np.flatnonzero(items.rows["sampled"])[-1]] = np.nan
    return items


def parts_of(sequences, values):
    """Values of tokens, sequence by sequence."""
    return np.split(values, np.cumsum(sequences.lengths)[:-1])


class Given(Model):
    """Whose parameters are the log-probabilities and entropies of a batch."""

    def logprobs(self, params, batch):
        return params


class Bigram(Model):
    """Whose parameters `[V, V]` are the logits after each token."""

    def logprobs(self, params, batch):
        tokens = jnp.asarray(batch.tokens)
        before = jnp.take_along_axis(tokens, jnp.asarray(batch.before), axis=1)
        logprobs = jax.nn.log_softmax(params["table"][before] / self.temperature)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0], entropy


def take(packing, rows):
    """The inverse of `packing.place`: values of tokens `[sum(lengths)]` out of rows `[R, L]`."""
    return rows.reshape(-1)[packing.places]
