"""Records what `transformers` makes of the models in parity_cases.py, for tests that run without it.

python tests/record_logits.py        # needs torch and transformers; writes tests/golden/logits.npz
"""

from pathlib import Path

import numpy as np
import parity_cases
import torch
import transformers

GOLDEN = Path(__file__).parent / "golden" / "logits.npz"


def model(case: str, kind: type = transformers.AutoModelForCausalLM, **changed) -> transformers.PreTrainedModel:
    """The model of a case, float32."""
    raw = parity_cases.CASES[case] | changed
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    made = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.from_numpy(parity_cases.weight(name, tuple(parameter.shape))))
    return made


def logits(case: str) -> np.ndarray:
    """float32 `[ROWS, LENGTH, V]`."""
    return forward(model(case), case)


def forward(model: transformers.PreTrainedModel, case: str) -> np.ndarray:
    """What a model makes of a case's tokens."""
    with torch.no_grad():
        return model(torch.from_numpy(parity_cases.tokens(case)).long()).logits.numpy()


if __name__ == "__main__":
    recorded = {case: logits(case) for case in parity_cases.CASES}
    np.savez_compressed(GOLDEN, **recorded)
    for case, values in recorded.items():
        print(f"{case:20} largest |logit| {np.abs(values).max():.2f}")
