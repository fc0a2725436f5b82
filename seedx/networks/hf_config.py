"""Hugging Face's config.json as a TransformerConfig, and back.

Every field is taken once. What is left over and not known to be harmless is refused: it might change the result.
"""

import math
from typing import Any

from seedx.networks.hf_fields import Fields
from seedx.networks.hf_rope import read_scaling, written_scaling
from seedx.networks.model_error import ModelError
from seedx.networks.transformer_config import TransformerConfig

# Defaults where config.json leaves a field out; those of the architecture itself are in `_DEFAULTS`.
_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": False}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "Gemma2ForCausalLM": _GEMMA
    | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA
    | {
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}
MULTIMODAL_GEMMA3 = "Gemma3ForConditionalGeneration"
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Training, bookkeeping and special tokens, which the tokenizer knows better.
_HARMLESS = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "use_cache"),
    *("cache_implementation", "pretraining_tp", "id2label", "label2id", "return_dict", "is_llama_config"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version"),
}
# Of the part that sees images, which is left out.
_VISION = {
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    *("tie_word_embeddings",),
}


def from_hf(raw: dict[str, Any]) -> TransformerConfig:
    """The settings of a config.json.

    Raises:
        ModelError: the architecture or a field is not supported; the message names field and value.
        ConfigError: settings that contradict each other.
    """
    try:
        return _read(raw, architecture_of(raw))
    except (TypeError, ZeroDivisionError) as error:
        raise ModelError(f"config.json has a value of the wrong kind: {error}.") from None


def _read(raw: dict[str, Any], architecture: str) -> TransformerConfig:
    if architecture == MULTIMODAL_GEMMA3:
        whole = Fields(raw, {})
        raw, architecture = whole.take("text_config"), "Gemma3ForCausalLM"
        whole.refuse_rest(_HARMLESS | _VISION)
    fields = Fields(raw, _COMMON | _DEFAULTS[architecture])
    gemma = architecture.startswith("Gemma")
    width, num_heads = fields.take_count("hidden_size"), fields.take_count("num_attention_heads")
    num_layers, max_length = fields.take_count("num_hidden_layers"), fields.take_count("max_position_embeddings")
    window, sliding = _sliding(fields, architecture, num_layers)
    rope = _rope(fields, architecture, max_length)
    head_dim = fields.take_count("head_dim", None) or width // num_heads
    scalar = fields.take("query_pre_attn_scalar") if gemma else head_dim
    config = TransformerConfig(
        vocab_size=fields.take_count("vocab_size"),
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.take_count("num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        ffn_width=fields.take_count("intermediate_size"),
        activation=_activation(fields, "hidden_activation" if gemma else "hidden_act"),
        max_length=max_length,
        **rope,
        norm_eps=fields.take("rms_norm_eps"),
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        attention_bias=architecture == "Qwen2ForCausalLM",
        tie_embeddings=fields.take("tie_word_embeddings"),
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        sliding_window=window,
        sliding_layers=sliding,
        attention_soft_cap=fields.take("attn_logit_softcapping", None) or 0.0 if gemma else 0.0,
        final_soft_cap=fields.take("final_logit_softcapping", None) or 0.0 if gemma else 0.0,
        query_scale=None if scalar == head_dim else scalar**-0.5,
    )
    fields.refuse_rest(_HARMLESS | ({"hidden_act"} if gemma else set()))
    return config


def architecture_of(raw: dict[str, Any]) -> str:
    """The one architecture that a config.json names.

    Raises:
        ModelError: none, several, or one that is not supported.
    """
    named = raw.get("architectures") or [
        name for name, model_type in _MODEL_TYPES.items() if model_type == raw.get("model_type")
    ]
    known = [*_DEFAULTS, MULTIMODAL_GEMMA3]
    if len(named) != 1 or named[0] not in known:
        raise ModelError(
            f"config.json's field architectures ({named}, model_type {raw.get('model_type')!r}) must name one of "
            f"{', '.join(known)}."
        )
    return named[0]


def _activation(fields: Fields, name: str) -> str:
    value = fields.take(name)
    if value not in _ACTIVATIONS:
        raise ModelError(f"config.json's field {name} ({value!r}) must be one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[value]


def _sliding(fields: Fields, architecture: str, num_layers: int) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers slide."""
    layers = range(num_layers)
    match architecture:
        case "LlamaForCausalLM":
            return 0, ()
        case "MistralForCausalLM":
            window = fields.take("sliding_window") or 0
            return window, (True,) * num_layers if window else ()
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            on, full = fields.take("use_sliding_window", False), fields.take("max_window_layers")
            sliding = [on and i >= full for i in layers]
        case _:
            pattern = 2 if architecture == "Gemma2ForCausalLM" else fields.take("sliding_window_pattern")
            pattern = fields.take("_sliding_window_pattern", pattern)
            sliding = [(i + 1) % pattern > 0 for i in layers]
    kinds = fields.take("layer_types", None)
    if kinds is not None:
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise ModelError(f"config.json's field layer_types has {sorted(unknown)}, which are not supported.")
        sliding = [kind == "sliding_attention" for kind in kinds]
    window = fields.take("sliding_window") or 0
    return (window, tuple(sliding)) if any(sliding) else (0, ())


def _rope(fields: Fields, architecture: str, max_length: int) -> dict[str, Any]:
    """Settings of the rotary frequencies, from either way of writing them (`rope_parameters` is the newer)."""
    theta = fields.take("rope_theta")
    scaling, parameters = fields.take("rope_scaling", None), fields.take("rope_parameters", None)
    parameters = parameters or scaling or {}
    if architecture != "Gemma3ForCausalLM":
        theta, scaling = read_scaling(parameters, theta, max_length)
        return {"rope_theta": theta, "rope_scaling": scaling}
    local = fields.take("rope_local_base_freq", 10_000.0)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local, local_scaling = read_scaling(parameters.get("sliding_attention") or {}, local, max_length)
        if local_scaling is not None:
            raise ModelError(f"config.json's field rope_parameters.sliding_attention ({local_scaling}) must not scale.")
        parameters = parameters.get("full_attention") or {}
    theta, scaling = read_scaling(parameters, theta, max_length)
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def to_hf(config: TransformerConfig) -> dict[str, Any]:
    """A config.json for a config: of the first architecture that has all its settings.

    Raises:
        ModelError: no architecture has them together.
    """
    for architecture in _DEFAULTS:
        raw = _written(config, architecture)
        if from_hf(raw) == config:
            return raw
    raise ModelError(f"No architecture of Hugging Face's has these settings together: {config}.")


def _written(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """What an architecture can say of a config."""
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    raw: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": written_scaling(config.rope_scaling),
    }
    gemma = architecture.startswith("Gemma")
    raw["hidden_activation" if gemma else "hidden_act"] = names[config.activation]
    if architecture != "LlamaForCausalLM":
        raw["sliding_window"] = config.sliding_window or None
    if architecture.startswith("Qwen"):
        raw |= {"use_sliding_window": config.sliding_window > 0, "max_window_layers": config.num_layers}
    if gemma or architecture.startswith("Qwen"):
        sliding = config.sliding_layers or (False,) * config.num_layers
        raw["layer_types"] = ["sliding_attention" if on else "full_attention" for on in sliding]
    if gemma:
        raw |= {
            "query_pre_attn_scalar": _whole(config.score_scale**-2),
            "attn_logit_softcapping": config.attention_soft_cap or None,
            "final_logit_softcapping": config.final_soft_cap or None,
        }
    if architecture == "Gemma3ForCausalLM":
        raw["rope_local_base_freq"] = config.local_rope_theta
    return raw


def _whole(value: float) -> float | int:
    """An int if it is one but for rounding: `transformers` takes no other."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value
