"""Rotary frequencies as config.json writes them: in `rope_parameters` or, older, in `rope_theta` and `rope_scaling`."""

import math
from typing import Any

from seedx.networks.hf_fields import Fields
from seedx.networks.model_error import ModelError
from seedx.networks.transformer_config import RopeScaling


def read_scaling(raw: dict[str, Any], theta: float, max_length: int) -> tuple[float, RopeScaling | None]:
    """Base and stretching of one set of parameters."""
    fields = Fields(raw, {}, "rope_parameters.")
    kind, legacy = fields.take("rope_type", None), fields.take("type", None)
    kind = kind or legacy or "default"
    theta = fields.take("rope_theta", theta)
    if fields.take("partial_rotary_factor", None) not in (None, 1.0):
        raise ModelError(f"config.json's field partial_rotary_factor ({raw['partial_rotary_factor']}) must be 1.")
    scaling = None
    match kind:
        case "default":
            pass
        case "linear":
            scaling = RopeScaling("linear", fields.take("factor"))
        case "llama3":
            scaling = RopeScaling(
                "llama3",
                fields.take("factor"),
                fields.take("original_max_position_embeddings", max_length),
                low_frequency_factor=fields.take("low_freq_factor"),
                high_frequency_factor=fields.take("high_freq_factor"),
            )
        case "yarn":
            factor = fields.take("factor")
            scaling = RopeScaling(
                "yarn",
                factor,
                fields.take("original_max_position_embeddings", max_length),
                beta_fast=fields.take("beta_fast", None) or 32.0,
                beta_slow=fields.take("beta_slow", None) or 1.0,
                attention_factor=_yarn_attention(fields, factor),
                truncate=fields.take("truncate", True),
            )
        case _:
            raise ModelError(
                f"config.json's field rope_scaling has rope_type {kind!r}, which is not supported; "
                "default, linear, llama3 and yarn are."
            )
    fields.refuse_rest(set())
    return theta, scaling


def _yarn_attention(fields: Fields, factor: float) -> float:
    """What yarn multiplies cosine and sine by (2309.00071, section 3.4)."""
    given, mscale, mscale_all = (fields.take(name, None) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return growth(mscale) / growth(mscale_all) if mscale and mscale_all else growth(1.0)


def written_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The field `rope_scaling`."""
    if scaling is None:
        return None
    raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        raw["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        raw |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.kind == "yarn":
        raw |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
    return raw
