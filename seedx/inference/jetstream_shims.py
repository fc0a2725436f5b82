"""The modules of google-jetstream 0.2.2, which today's libraries would not let run as they are.

Three things are put right around the import, none of which changes what JetStream does:

- Its token utilities import `seqio`, and with it TensorFlow, for SentencePiece models that are not used here. Where
  seqio is not installed, two empty classes stand for it during the import.
- `orchestrator.delete_pytree` calls `jax.tree_map`, which jax has removed; a function that does the same replaces it.
- Importing the orchestrator sets the root logger to DEBUG and has it write to stdout; this is undone.

Raises:
    ConfigError: google-jetstream is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Generator
from types import ModuleType

import jax

from seedx.checks import require
from seedx.types import Tree

require(
    importlib.util.find_spec("jetstream") is not None,
    "google-jetstream is not installed; install it without its dependencies, which would bring TensorFlow: "
    'pip install -e ".[llm,jetstream]" -c constraints.txt && pip install --no-deps google-jetstream==0.2.2',
)


@contextlib.contextmanager
def _seqio() -> Generator[None]:
    """Has `seqio.vocabularies` be importable."""
    if importlib.util.find_spec("seqio") is not None:
        yield
        return
    seqio, vocabularies = ModuleType("seqio"), ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    sys.modules |= {"seqio": seqio, "seqio.vocabularies": vocabularies}
    try:
        yield
    finally:
        del sys.modules["seqio"], sys.modules["seqio.vocabularies"]


@contextlib.contextmanager
def _root_logger_kept() -> Generator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


with _seqio(), _root_logger_kept():
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2


def _delete_pytree(tree: Tree) -> None:
    """Frees the arrays of a tree at once."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


orchestrator.delete_pytree = _delete_pytree

__all__ = [
    "engine_api",
    "jetstream_pb2",
    "jetstream_pb2_grpc",
    "orchestrator",
    "token_utils",
    "tokenizer_api",
    "tokenizer_pb2",
]
