"""Chat templates: Jinja programs that come with a model and turn messages into a prompt. They run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from seedx.bpe import read_json, token_text
from seedx.checks import ConfigError
from seedx.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# Of the byte tokenizer: "ChatML".
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Message = Mapping[str, Any]  # {"role": one of ROLES, "content": str}


class ChatTemplate:
    """A template with the texts of the special tokens that it names; rendered as `apply_chat_template` does.

    Args:
        source: Jinja.
        tokens: For example {"bos_token": "<s>"}.

    Raises:
        ConfigError: the source is no Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, functions)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no Jinja: {error}.") from error
        self._tokens = dict(tokens)

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        """The prompt as text.

        Args:
            messages: Each with role and content.
            add_generation_prompt: End with the begin of the assistant's answer.

        Raises:
            ValueError: a message is malformed, or the template refuses them.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from error

    def encode(self, tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        """The prompt as tokens. Special tokens come from the template alone: in a content they are characters.

        Raises:
            ValueError: as `render`.
        """
        check_messages(messages)
        safe: list[Message] = [{**message, "content": tokenizer.literal(message["content"])} for message in messages]
        return tokenizer.encode(self.render(safe, add_generation_prompt), parse_special=True)


def check_messages(messages: Any) -> None:
    """Refuses what is no list of messages; it may come from anywhere.

    Raises:
        ValueError: names the message and what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be an object with role and content, not {type(message).__name__}.")
        if unknown := message.keys() - {"role", "content"}:
            raise ValueError(f"messages[{i}] has {', '.join(sorted(map(str, unknown)))}; only role and content can be.")
        if message.get("role") not in ROLES:
            raise ValueError(f"messages[{i}].role ({message.get('role')}) must be one of {', '.join(ROLES)}.")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"messages[{i}].content must be a string, not {type(message.get('content')).__name__}.")


def template_from_gguf(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in a GGUF file; None: it has none."""
    source, texts = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens", [])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {names[key]: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in names}
    tokens = {name: texts[i] for name, i in ids.items() if i is not None and i < len(texts)}
    return ChatTemplate(source, tokens) if source else None


def template_from_directory(directory: Path) -> ChatTemplate | None:
    """The template of a Hugging Face directory, chat_template.jinja or tokenizer_config.json's; None: it has none."""
    settings, file = read_json(directory / "tokenizer_config.json"), directory / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    tokens = {name: token_text(settings[name]) for name in _TOKENS if settings.get(name)}
    return ChatTemplate(source, tokens) if source else None


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False, ensure_ascii: bool = False) -> str:
    """Without Jinja's escapes for HTML."""
    return json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
