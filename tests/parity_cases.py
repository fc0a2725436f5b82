"""Tiny models of every family, as config.json has them, with weights and tokens that follow from names.

Imports neither jax nor torch: the recorder of logits and the tests that compare with them share it.
"""

import zlib

import numpy as np

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN2 = _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3}
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
_GEMMA = _LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_GEMMA3 = _GEMMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

CASES = {
    "llama": _LLAMA,
    "llama_tied_theta": _LLAMA | {"tie_word_embeddings": True, "rope_theta": 500.0, "num_key_value_heads": 1},
    "llama_linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama_llama3": _LLAMA | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 16}},
    "llama_yarn": _LLAMA | {"rope_scaling": _YARN | {"beta_fast": 2.0, "beta_slow": 0.2}, "rope_theta": 100.0},
    "llama_yarn_mscale": _LLAMA
    | {"rope_parameters": _YARN | {"rope_theta": 50.0, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "mistral": _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5},
    "mistral_full": _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": _QWEN2,
    "qwen2_sliding": _QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": _QWEN3,
    "qwen3_yarn_tied": _QWEN3 | {"rope_scaling": _YARN | {"truncate": False}, "tie_word_embeddings": True},
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3 | {"layer_types": _KINDS, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3_pattern": _GEMMA3 | {"sliding_window_pattern": 2, "rope_local_base_freq": 20.0, "rope_theta": 300.0},
    "gemma3_nested": _GEMMA3
    | {
        "layer_types": _KINDS,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 70.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
}
ROWS, LENGTH = 2, 20


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of a name, large enough for every part of a model to show."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)
    if "norm" in name:
        return 1.0 + 0.3 * values
    return values * np.float32(0.7 if "embed" in name or name.endswith("bias") else 1.5 * shape[-1] ** -0.5)


def tokens(case: str) -> np.ndarray:
    """Ids `[ROWS, LENGTH]` of a case."""
    vocab_size = CASES[case]["vocab_size"]
    return np.random.default_rng(zlib.crc32(case.encode())).integers(0, vocab_size, (ROWS, LENGTH)).astype(np.int32)
