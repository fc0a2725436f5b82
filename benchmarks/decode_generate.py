"""The part of decode.py that Hugging Face's generate plays, in an interpreter with torch and transformers.

Its argument is JSON: {"gguf": path} or {"llama": settings of a LlamaConfig with random weights}. Each line of its input
is a static batch, {"prompts": ids, "new_tokens": n, "sample": bool}: padded on the left to its longest prompt, all rows
run for all n tokens. `sample` draws at temperature 1 and gives the log-probability of each token. Answers a line with
the seconds that it took.
"""

import json
import sys
import time
from pathlib import Path

import torch  # pyrefly: ignore [missing-import]
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # pyrefly: ignore [missing-import]


def load(source: dict):
    """A model in float32."""
    torch.manual_seed(0)
    if "llama" in source:
        return LlamaForCausalLM(LlamaConfig(**source["llama"])).eval()
    path = Path(source["gguf"])
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def generate(model, prompts: list[list[int]], new_tokens: int, sample: bool) -> None:
    """One static batch."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=mask,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            output_scores=sample,
            return_dict_in_generate=True,
            **settings,
        )
        assert out.sequences.shape == (len(prompts), longest + new_tokens)
        if sample:
            torch.stack(out.scores, 1).log_softmax(-1).gather(-1, out.sequences[:, longest:, None])


if __name__ == "__main__":
    model = load(json.loads(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        started = time.perf_counter()
        generate(model, **batch)
        print(time.perf_counter() - started, flush=True)
