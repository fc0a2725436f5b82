"""A reward that a model with a scalar head gives, on the CPU of the process that computes rewards.

Loads jax, which no other reward does; a task has this module loaded only if it asks for a reward model.
"""

from __future__ import annotations

import functools
import resource
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedx import compilation_cache
from seedx.bpe import from_json
from seedx.chat import template_from_directory
from seedx.checks import require
from seedx.envs.text.task import Prompt
from seedx.networks.hf_score import open_score_model, scores
from seedx.reward_config import RewardConfig

_LEAST_LENGTH = 64  # of a row
_MOST_ROWS = 8  # of one launch
_CHUNK_BYTES = 2**20
# Address space of a process that loads jax and compiles, beside the weights, which are in it once and in part again.
_BASE_BYTES = 5 * 2**29
_WEIGHTS_COPIES = 1.25


class RewardModel:
    """A transformer with a linear head of one output; the reward is what the head makes of the last token's state.

    What is scored is the conversation with the completion as the assistant's last message, through the model's chat
    template; of a model without one, the prompt's text with the completion behind it. A score does not depend on what
    else is scored. Any thread may call; scores are computed one after another.

    Args:
        path: A Hugging Face directory of a ...ForSequenceClassification with one label: config.json, safetensors,
            tokenizer.json.
        max_tokens: Of a text; at most as many as the model was made for.

    Attributes:
        version: CRC-32 of the weights' files, once they are loaded.

    Raises:
        ConfigError: it is no such model, or not supported.
    """

    def __init__(self, path: str, *, max_tokens: int = 2048) -> None:
        require(max_tokens > 0, f"the reward model's max_tokens ({max_tokens}) must be positive.")
        directory = Path(path)
        self._path, self._model = path, open_score_model(directory)
        self._tokenizer, self._template = from_json(directory), template_from_directory(directory)
        self._max_tokens = min(max_tokens, self._model.config.max_length)
        self._lock = threading.Lock()
        self._weights: tuple[Any, ...] = ()  # params and head
        self._programs: dict[tuple[int, int], Callable[..., Any]] = {}
        self.version: int | None = None

    def check_config(self, config: RewardConfig) -> None:
        """Refuses processes that have not the memory.

        Raises:
            ConfigError: they have not.
        """
        self._require_memory(config.memory_bytes)

    def prepare(self) -> None:
        """Loads the weights and compiles, which takes from seconds to minutes; the first score would do it too.

        Raises:
            ConfigError: this process may not have the memory.
        """
        with self._lock:
            self._load()

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """The score of a completion.

        Raises:
            ValueError: the text is too long, or the prompt has messages and the model no chat template.
        """
        return float(self.score([self.encode(prompt, completion)])[0])

    def encode(self, prompt: Prompt, completion: str) -> list[int]:
        """The text that is scored, as tokens.

        Raises:
            ValueError: the prompt has messages and the model no chat template, or that refuses them.
        """
        if self._template is not None:
            asked = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
            messages = [*asked, {"role": "assistant", "content": completion}]
            return self._template.encode(self._tokenizer, messages, add_generation_prompt=False)
        if prompt.messages:
            raise ValueError(f"the prompt has messages, and the reward model {self._path} no chat template.")
        return self._tokenizer.encode(prompt.text + completion)

    def score(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores of texts that are tokens, float32 `[N]`.

        Raises:
            ValueError: a text has no token, or more than `max_tokens`.
        """
        for text in texts:
            if not 0 < len(text) <= self._max_tokens:
                raise ValueError(
                    f"a text has {len(text)} tokens, and the reward model {self._path} takes 1 to {self._max_tokens}; "
                    "lower --rollout.max-tokens, or raise its max_tokens where the model knows more."
                )
        found = np.empty(len(texts), np.float32)
        with self._lock:
            self._load()
            shortest = 0
            for length in self._lengths():
                rows = [i for i, text in enumerate(texts) if shortest < len(text) <= length]
                for start in range(0, len(rows), _MOST_ROWS):
                    part = rows[start : start + _MOST_ROWS]
                    found[part] = self._launch([texts[i] for i in part], length)
                shortest = length
        return found

    def _launch(self, texts: Sequence[Sequence[int]], length: int) -> np.ndarray:
        """Scores of a few texts of up to `length` tokens; the rows are padded to a power of two."""
        tokens = np.zeros((1 << (len(texts) - 1).bit_length(), length), np.int32)
        last = np.zeros(len(tokens), np.int32)
        for i, text in enumerate(texts):
            tokens[i, : len(text)], last[i] = text, self._model.last(text)
        program = self._program(*tokens.shape)
        return np.asarray(program(*self._weights, tokens, last))[: len(texts)]

    def _program(self, num_rows: int, length: int) -> Callable[..., Any]:
        """The compiled program for so many rows of a length."""
        if (num_rows, length) not in self._programs:
            ids, last = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((num_rows, length), (num_rows,)))
            compute = jax.jit(functools.partial(scores, self._model.config))
            self._programs[num_rows, length] = compute.lower(*self._weights, ids, last).compile()
        return self._programs[num_rows, length]

    def _lengths(self) -> list[int]:
        """Lengths that there are programs for, which double."""
        lengths = [min(_LEAST_LENGTH, self._max_tokens)]
        while lengths[-1] < self._max_tokens:
            lengths.append(min(2 * lengths[-1], self._max_tokens))
        return lengths

    def _load(self) -> None:
        """Weights, and programs for one text; the first call does it."""
        if self.version is not None:
            return
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit not in (resource.RLIM_INFINITY, -1):
            self._require_memory(limit)
        compilation_cache.use()
        self._weights = self._model.load()
        for length in self._lengths():
            self._program(1, length)
        self.version = _checksum(self._model.files)

    def _require_memory(self, limit: int) -> None:
        """Refuses a limit of address space, bytes, that the model does not fit into."""
        needed = int(4 * self._model.num_params * _WEIGHTS_COPIES) + _BASE_BYTES
        require(
            needed <= limit,
            f"the reward model {self._path} needs about {needed:,} bytes of address space, and its process may have "
            f"{limit:,}; give --reward.memory-bytes {needed} or more.",
        )


def _checksum(files: Sequence[Path]) -> int:
    """CRC-32 of some files, one after another."""
    value = 0
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
    return value
