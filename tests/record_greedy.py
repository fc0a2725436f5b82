"""Writes golden/smollm2_greedy.json: greedy continuations by transformers, and the largest logit of each step.

pip install transformers==5.24.0 gguf==0.19.0 torch==2.13.0 accelerate
python tests/record_greedy.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = Path(__file__).parent / "golden" / "smollm2_greedy.json"
NEW_TOKENS = 32
PROMPTS = [
    *("The capital of France is", "Once upon a time", "def fibonacci(n):", "The three primary colours are", "2 + 2 ="),
    *("Water boils at", "Dear Sir or Madam,", "Ingredients:\n- 2 eggs\n-", "The opposite of hot is", "In 1969,"),
    *("SELECT name FROM", "Roses are red,", "A triangle has", "My favourite book is", "Der Himmel ist"),
    *("<html>\n<head>", "To be, or not to be,", "The mitochondria is", "1, 2, 3, 4,", "Q: Who wrote Hamlet?\nA:"),
]


def main(path):
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
    model.generation_config.eos_token_id = None
    cases = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            tokens, do_sample=False, max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True
        )
        largest = [round(logits.max().item(), 4) for logits in out.logits]
        length = tokens.shape[1]
        cases.append({"prompt": prompt, "tokens": out.sequences[0, length:].tolist(), "largest_logits": largest})
    FILE.write_text(json.dumps(cases, indent=None).replace("}, {", "},\n{") + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
