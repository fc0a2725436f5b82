"""What a transformer is made of, whichever family it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from seedx.checks import finite, not_negative, positive, require

ACTIVATIONS = ("silu", "gelu_tanh")
SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than those of pre-training.

    Attributes:
        kind: "linear" (2306.15595), "llama3" (2407.21783) or "yarn" (2309.00071).
        factor: How much longer the context is.
        original_length: Tokens of the pre-training context; llama3 and yarn.
        low_frequency_factor: llama3: frequencies with fewer turns than this in `original_length` are stretched.
        high_frequency_factor: llama3: those with more turns than this stay; in between, a linear blend.
        beta_fast: yarn: dimensions with more turns than this in `original_length` stay.
        beta_slow: yarn: those with fewer turns than this are stretched; in between, a linear blend.
        attention_factor: yarn: what cosine and sine are multiplied by.
        truncate: yarn: whether the blend's ends are rounded outwards to whole dimensions.
    """

    kind: str
    factor: float
    original_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        require(self.kind in SCALINGS, f"RopeScaling.kind ({self.kind}) must be one of {', '.join(SCALINGS)}.")
        finite(self)
        positive(self, "factor", "low_frequency_factor", "beta_fast", "beta_slow", "attention_factor")
        not_negative(self, "original_length")
        require(
            self.kind == "linear" or self.original_length > 0,
            f"RopeScaling.original_length ({self.original_length}) must be positive for {self.kind}.",
        )
        require(
            self.high_frequency_factor > self.low_frequency_factor,
            f"RopeScaling.high_frequency_factor ({self.high_frequency_factor}) must be greater than "
            f"low_frequency_factor ({self.low_frequency_factor}).",
        )


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder of the Llama shape (RMSNorm, rotary positions, grouped queries, gated feed-forward) and its variants.

    Attributes:
        vocab_size: V, token ids.
        width: D, of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves `num_heads / num_kv_heads` query heads (2305.13245).
        head_dim: Width of a head; even.
        ffn_width: F, of the gated feed-forward (2002.05202).
        activation: Of the gate: "silu" (SwiGLU) or "gelu_tanh" (GeGLU).
        max_length: Positions that the model was made for.
        rope_theta: Base of the rotary frequencies (2104.09864).
        rope_scaling: Their stretching; None: as they are.
        local_rope_theta: Base in sliding layers, which then do not stretch (Gemma-3); None: as elsewhere.
        norm_eps: Of every RMSNorm (1910.07467).
        norm_offset: What is added to the weight of every RMSNorm: 1 for Gemma, whose weights are stored around zero.
        post_norms: Whether what attention and feed-forward give is normalised too (Gemma-2, Gemma-3).
        qk_norm: Whether each head's queries and keys are normalised (Qwen3, Gemma-3).
        attention_bias: Whether queries, keys and values have a bias (Qwen2).
        tie_embeddings: Whether the output uses the embedding.
        embedding_scale: What embeddings are multiplied by: sqrt(width) for Gemma.
        sliding_window: Positions that a sliding layer's token sees, itself included; 0: no layer slides.
        sliding_layers: For each layer whether it slides; empty: none.
        attention_soft_cap: c of c * tanh(score / c); 0: off (Gemma-2).
        final_soft_cap: The same of the logits.
        query_scale: What scores are multiplied by; None: 1 / sqrt(head_dim).
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    activation: str = "silu"
    max_length: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    query_scale: float | None = None

    def __post_init__(self) -> None:
        finite(self)
        positive(self, "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_width")
        positive(self, "max_length", "rope_theta", "norm_eps", "embedding_scale")
        not_negative(self, "norm_offset", "sliding_window", "attention_soft_cap", "final_soft_cap")
        require(
            self.activation in ACTIVATIONS,
            f"TransformerConfig.activation ({self.activation}) must be one of {', '.join(ACTIVATIONS)}.",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"TransformerConfig.num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}).",
        )
        for name in ("local_rope_theta", "query_scale"):
            value = getattr(self, name)
            require(value is None or value > 0, f"TransformerConfig.{name} ({value}) must be positive, or None.")
        require(self.head_dim % 2 == 0, f"TransformerConfig.head_dim ({self.head_dim}) must be even.")
        require(
            len(self.sliding_layers) in (0, self.num_layers),
            f"TransformerConfig.sliding_layers has {len(self.sliding_layers)} entries for {self.num_layers} layers.",
        )
        require(
            self.sliding_window > 0 or not any(self.sliding_layers),
            "TransformerConfig.sliding_window (0) must be positive if layers slide.",
        )

    @property
    def queries_per_kv(self) -> int:
        """G, query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.query_scale or 1.0 / math.sqrt(self.head_dim)

    def window(self, layer: int) -> int:
        """Positions that a token of a layer sees; 0: all."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else 0
