"""Writes golden/texts.json: token ids of texts by SmolLM2's tokenizer, and chat prompts, both from transformers.

pip install transformers==5.24.0 gguf==0.19.0 torch==2.13.0
python tests/record_texts.py SmolLM2-135M-Instruct.Q4_1.gguf
"""
# ruff: noqa: RUF001

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

FILE = Path(__file__).parent / "golden" / "texts.json"
TEXTS = [
    *("", " ", "  ", "\n", "\n\n", "\t", " \n ", "a", " a", "a ", "  a  b   c    d", "one\ntwo\n\nthree\n\n\n four"),
    "The capital of France is",
    "Once upon a time, there was a little girl who lived in a village near the forest.",
    *("I'm you're he'll we've it's they'd don't CAN'T", "a" * 100, "=" * 70, "!!! ??? ... --- ((())) [[]] {{}}"),
    *("0", "12345", "3.14159", "1,000,000", "x1y22z333", " 2024-01-31 23:59:59", "1 + 1 = 2", "0x7fff"),
    "def f(x: int) -> int:\n    return x ** 2\n\n\tprint(f(3))\r\n",
    *('{"key": [1, 2.5, null, "v"]}', "https://example.org/a?b=c&d=%20#e", "user@example.org", "\\frac{1}{2} $x_i^2$"),
    *("Überraschung, naïve café, Ångström, ŝanĝo", "Привет, мир!", "Καλημέρα, κόσμε", "مرحبا بالعالم", "שלום עולם"),
    *("日本語のテキスト", "中文字符，没有空格。", "안녕하세요 세계", "ไทยไม่มีช่องว่าง", "हिन्दी में पाठ"),
    *("😀", "👩‍👩‍👧‍👦 family 🇩🇪 flag", "mixed 😀日本 emoji", "zero\u200bwidth and\u00a0no-break", "e\u0301 é", "ﬁ ™ ∑"),
    "ends with spaces   ",
]

# Made up, in the manner of other models' templates.
STRICT = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
RICH = """\
{%- set state = namespace(system='Be helpful.', turns=0) %}
{%- if messages[0].role == 'system' %}{%- set state.system = messages[0].content %}{%- endif %}
{{- bos_token + '<|header|>system\\n' + state.system + '\\nYear has 4 digits: ' }}
{{- (strftime_now('%Y') | length == 4) | tojson + eos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set state.turns = state.turns + 1 %}
    {{- '<|header|>' ~ message.role ~ ' ' ~ state.turns ~ '\\n' }}
    {{- {'text': message.content, 'html': '<b>', 'umlaut': 'ü'} | tojson(indent=2) if message.role == 'tool' else
        message.content.split('</think>')[-1].strip() }}
    {{- eos_token if not loop.last or tools is none }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|header|>assistant\\n' }}
{%- endif %}
"""
CHATS = [
    [("user", "Hi!")],
    [("system", "You count."), ("user", " 1, 2, \n")],
    [("user", "Hi!"), ("assistant", "<think>hm</think> Hello."), ("user", "Ünicode 😀 <b>&amp;</b> \"'")],
    [("user", "2 + 2"), ("tool", "4\n\t<&>"), ("assistant", "It is 4."), ("user", "")],
]


def render(tokenizer, template, chat, prompt):
    try:
        return tokenizer.apply_chat_template(chat, chat_template=template, add_generation_prompt=prompt, tokenize=False)
    except Exception as error:
        return {"error": str(error)}


def main(path):
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    templates = {"smollm2": tokenizer.chat_template, "strict": STRICT, "rich": RICH}
    chats = [
        {"template": name, "messages": messages, "prompt": prompt, "text": render(tokenizer, source, messages, prompt)}
        for name, source in templates.items()
        for messages in [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
        for prompt in (False, True)
    ]
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    golden = {"texts": texts, "templates": templates, "tokens": tokens, "chats": chats}
    FILE.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
